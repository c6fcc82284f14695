"""A Fabric connection that trusts the cluster's own known_hosts and key, and nothing else on this laptop."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import fabric
import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from micsctl.cluster.model import Cluster
from micsctl.errors import UsageError
from micsctl.home import ClusterFiles
from micsctl.remote.host import HostError, HostKeyError, LoginError
from micsctl.remote.hostkeys import known_name

# Paramiko logs every failed handshake with a traceback; the same failure reaches the user as a HostError.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True)
class SshSettings:
    """How the nodes of one cluster are reached: read from the laptop's files once, used for every node."""

    cluster: str
    user: str
    port: int
    key: paramiko.PKey
    known: paramiko.HostKeys
    known_hosts: Path
    connect_timeout_seconds: float

    @classmethod
    def load(cls, cluster: Cluster, files: ClusterFiles, connect_timeout_seconds: float) -> SshSettings:
        """Raises UsageError where this laptop lacks the cluster's key or host keys, or they are damaged."""
        require_files(cluster, files)
        try:
            key = paramiko.PKey.from_path(str(files.key))
            known = paramiko.HostKeys(str(files.known_hosts))
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            raise UsageError(f"cannot read the SSH files in {files.folder}", _text(error)) from None
        return cls(
            cluster.name, cluster.ssh_user, cluster.ssh_port, key, known, files.known_hosts, connect_timeout_seconds
        )


def require_files(cluster: Cluster, files: ClusterFiles) -> None:
    """Raises UsageError where this laptop lacks the cluster's key or host keys."""
    for path, kind in ((files.key, "key"), (files.known_hosts, "host keys")):
        if not path.exists():
            raise UsageError(
                f"this laptop does not have the {kind} of cluster {cluster.name!r}",
                f"{path} does not exist; without it only status and down work",
                next=f"go on from the laptop that made the cluster, or: micsctl down -n {cluster.name}",
            )


class StrictConnection(fabric.Connection):  # type: ignore[misc]  # fabric has no types
    """Fabric's own adds unknown host keys, asks the agent and reads the user's ssh_config; this one does not."""

    def __init__(self, settings: SshSettings, address: str, gateway: StrictConnection | None) -> None:
        seconds = settings.connect_timeout_seconds
        super().__init__(
            address,
            user=settings.user,
            port=settings.port,
            gateway=gateway,
            config=fabric.Config(overrides={"load_ssh_configs": False}, lazy=True),
            forward_agent=False,
            connect_kwargs={
                "timeout": seconds,
                "pkey": settings.key,
                "look_for_keys": False,
                "allow_agent": False,
                "banner_timeout": seconds,
                "auth_timeout": seconds,
                "channel_timeout": seconds,  # of a jump through this connection too; paramiko's default is an hour
            },
        )
        name = known_name(address, settings.port)
        for algorithm, key in (settings.known.lookup(name) or {}).items():
            self.client.get_host_keys().add(name, algorithm, key)
        self.client.set_missing_host_key_policy(_Refuse())


class UnknownHostKey(paramiko.SSHException):
    """No key of this address stands in known_hosts."""

    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("unknown host key")
        self.key = key


class _Refuse(paramiko.RejectPolicy):
    """Refuses like its parent, and hands over the key that was shown."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> NoReturn:
        raise UnknownHostKey(key)


def is_transient(error: BaseException) -> bool:
    """Whether the same attempt may succeed a moment later. Takes a HostError, or what opening a connection raised."""
    if isinstance(error, HostError):
        return error.transient
    if isinstance(error, (UnknownHostKey, paramiko.BadHostKeyException, paramiko.AuthenticationException)):
        return False
    if isinstance(error, paramiko.ChannelException):
        return error.code == 2  # RFC 4254, 5.1: the jump host could not connect; any other code is its refusal
    return isinstance(error, (OSError, EOFError, paramiko.SSHException))


def explain(error: Exception, settings: SshSettings, name: str, address: str) -> HostError:
    """The error of opening a connection, in words that name the node."""
    at = f"{name} at {known_name(address, settings.port)}"
    if isinstance(error, UnknownHostKey):
        return HostKeyError(
            f"the host key of {at} is unknown, so nothing was sent to it",
            f"it shows {error.key.get_name()} {error.key.fingerprint}\n"
            f"{settings.known_hosts} has no key for this address: what answers there may be another machine",
            next=f"micsctl up -n {settings.cluster}   (reads the host keys from the nodes' consoles again)",
        )
    if isinstance(error, paramiko.BadHostKeyException):
        return HostKeyError(
            f"the host key of {at} is not the expected one, so nothing was sent to it",
            f"shown     {error.key.get_name()} {error.key.fingerprint}\n"
            f"expected  {error.expected_key.get_name()} {error.expected_key.fingerprint}\n"
            f"          from {settings.known_hosts}\n"
            "either the machine was replaced, or something between here and it answers in its place",
            next=f"micsctl status -n {settings.cluster}   (shows whether AWS replaced the machine)",
        )
    if isinstance(error, paramiko.AuthenticationException):
        return LoginError(
            f"{at} refuses the login of {settings.user!r}",
            f"{_text(error)}; the key was {settings.key.get_name()} {settings.key.fingerprint}",
            next=f"micsctl status -n {settings.cluster}",
        )
    return HostError(
        f"cannot reach {at}",
        _text(error),
        next=f"micsctl status -n {settings.cluster}",
        transient=is_transient(error),
    )


def _text(error: Exception) -> str:
    if isinstance(error, NoValidConnectionsError):  # its own text hides the reasons
        return "; ".join(dict.fromkeys(str(reason) for reason in error.errors.values()))
    if isinstance(error, paramiko.ChannelException):
        return f"the jump through the head failed: {error.text}"
    return str(error) or type(error).__name__
