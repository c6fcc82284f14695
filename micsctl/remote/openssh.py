"""The OpenSSH command line that trusts exactly what our own connections trust. Pure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from micsctl.cluster.model import Cluster, Node
from micsctl.home import ClusterFiles


def route(cluster: Cluster, node: Node) -> tuple[str, Node | None]:
    """The address to connect to, and the node to jump through (None = directly).

    A node with a public address is reached there; any other through the head where the head has one.
    """
    if node.public_ip:
        return node.public_ip, None
    jump = cluster.head if cluster.head.public_ip and cluster.head.index != node.index else None
    return node.private_ip, jump


def ssh_command(cluster: Cluster, files: ClusterFiles, node: Node, *, connect_timeout_seconds: int = 10) -> list[str]:
    """The argv that opens a shell on `node`; append a command to run that instead.

    The jump is a ProxyCommand, because ProxyJump would not hand the key and the known_hosts on to its own ssh.
    """
    options = [*_options(files, connect_timeout_seconds), "-p", str(cluster.ssh_port), "-l", cluster.ssh_user]
    address, jump = route(cluster, node)
    if jump:
        # ssh expands % in the ProxyCommand once, and the inner ssh expands its own options again
        inner = shlex.join(["ssh", *options]).replace("%", "%%")
        options += ["-o", f"ProxyCommand={inner} -W %h:%p {route(cluster, jump)[0]}"]
    return ["ssh", *options, address]


def _options(files: ClusterFiles, connect_timeout_seconds: int) -> list[str]:
    settings = {
        "UserKnownHostsFile": _path(files.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "IdentityFile": _path(files.key),
        "ConnectTimeout": str(connect_timeout_seconds),
        "ServerAliveInterval": "15",
        "LogLevel": "ERROR",
    }
    return ["-F", "/dev/null", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


def _path(path: Path) -> str:
    """A path as an option's value: % begins a token there, and blanks, quotes and backslashes need quotes."""
    text = str(path).replace("%", "%%")
    if not re.search(r"""[\s'"\\]""", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
