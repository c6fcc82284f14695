"""Real sshds on loopback addresses, each with a home folder and host keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from micsctl.cluster.model import Cluster, Node
from micsctl.home import ClusterFiles
from micsctl.remote.hostkeys import HostKey, known_hosts_of, write_known_hosts

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
PRIVSEP = Path("/run/sshd")  # a root sshd refuses to start without it


@dataclass
class Sshd:
    """One node: a listening sshd whose sessions begin in `home`."""

    folder: Path
    address: str
    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def host_key(self) -> HostKey:
        algorithm, body, *_ = (self.folder / "host_key.pub").read_text().split()
        return HostKey(algorithm, body)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, authorized_key: str, *options: str) -> None:
        self.home.mkdir(parents=True)
        make_key(self.folder / "host_key")
        (self.folder / "authorized_keys").write_text(authorized_key)
        login = self.folder / "login.sh"
        login.write_text('cd "$HOME" || exit 1\nexec bash -c "$SSH_ORIGINAL_COMMAND"\n')
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                (
                    f"ListenAddress {self.address}:{self.port}",
                    f"HostKey {self.folder}/host_key",
                    f"AuthorizedKeysFile {self.folder}/authorized_keys",
                    f"ForceCommand sh {login}",
                    f"SetEnv HOME={self.home}",
                    "PidFile none",
                    "UsePAM no",
                    "StrictModes no",
                    "PasswordAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "LogLevel VERBOSE",
                    *options,
                )
            )
        )
        assert SSHD
        log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
        wait_for_port(self)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@dataclass(frozen=True)
class Fleet:
    """Sshds as a cluster, with the laptop's files of it."""

    sshds: tuple[Sshd, ...]
    cluster: Cluster
    files: ClusterFiles

    def trust(self, *keys: HostKey) -> None:
        """Write known_hosts with these keys in place of the right ones, in node order."""
        keys_of = {node.instance_id: [key] for node, key in zip(self.cluster.nodes, keys, strict=True)}
        write_known_hosts(self.files.known_hosts, known_hosts_of(self.cluster, keys_of))


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True, timeout=20)


def make_fleet(
    folder: Path,
    addresses: tuple[str, ...],
    *,
    head_is_public: bool,
    options: tuple[str, ...] = (),
    laptop: str = "laptop",
) -> Fleet:
    """One running sshd per address; where the head is public, the others are reached through it."""
    files = ClusterFiles(folder / laptop)
    files.folder.mkdir(mode=0o700)
    make_key(files.key)
    port = free_port(addresses)
    sshds = tuple(Sshd(folder / f"node{i}", address, port) for i, address in enumerate(addresses))
    for sshd in sshds:
        sshd.start(files.key.with_suffix(".pub").read_text(), *options)
    nodes = tuple(
        Node(i, f"i-{i:04x}", "running", address, address if head_is_public and i == 0 else None)
        for i, address in enumerate(addresses)
    )
    now = datetime.now(UTC)
    user = getpass.getuser()
    cluster = Cluster("test", "sandbox", "us-east-1", "us-east-1a", "p4d.24xlarge", user, port, now, now, nodes)
    fleet = Fleet(sshds, cluster, files)
    fleet.trust(*(sshd.host_key for sshd in sshds))
    return fleet


def free_port(addresses: tuple[str, ...]) -> int:
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind((addresses[0], 0))
            port: int = probe.getsockname()[1]
        if all(_is_free(address, port) for address in addresses):
            return port
    raise RuntimeError("no port is free on every address")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def wait_for_port(sshd: Sshd) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert sshd.process.poll() is None, sshd.log
        with socket.socket() as probe:
            if probe.connect_ex((sshd.address, sshd.port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(sshd.log)


@pytest.fixture(scope="session", autouse=True)
def _can_run_sshd() -> Iterator[None]:
    if not SSHD or not sys.platform.startswith("linux"):
        pytest.skip("needs sshd on Linux")
    made = os.geteuid() == 0 and not PRIVSEP.exists()
    if made:
        PRIVSEP.mkdir(mode=0o755)
    yield
    if made:
        PRIVSEP.rmdir()


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One node, reached directly."""
    fleet = make_fleet(tmp_path_factory.mktemp("direct"), ("127.0.0.1",), head_is_public=False)
    yield fleet
    for sshd in fleet.sshds:
        sshd.stop()


@pytest.fixture(scope="session")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A public head and two nodes behind it. The laptop's folder has a name that ssh options trip over."""
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    folder = tmp_path_factory.mktemp("chained")
    fleet = make_fleet(folder, addresses, head_is_public=True, laptop='a laptop\'s \\ "50%h" folder')
    yield fleet
    for sshd in fleet.sshds:
        sshd.stop()
