"""The sandbox's folder: who owns it, what its server said, and everything on this machine that belongs to it.

Whoever holds the lock of the folder is its server. A folder without an owner is a dead sandbox, and is swept by
`stop` and by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARK = "MICSCTL_SANDBOX"  # environment variable that every process of a sandbox carries
ROOT_MARK = "etc/micsctl-sandbox"  # file in the root of every node of the netns level
_SWEEP_SECONDS = 10.0
_SERVER = b"micsctl.sandbox.server\0"


@dataclass(frozen=True)
class SandboxFolder:
    """`MICSCTL_HOME/sandbox`, mode 0700."""

    path: Path

    @property
    def id(self) -> str:
        """8 hex digits that tell sandboxes of different homes apart: in interface names and process marks."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def state(self) -> Path:
        """What the server says about itself, with the secret key. Mode 0600."""
        return self.path / "state.json"

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"

    @property
    def shared(self) -> Path:
        return self.path / "shared"

    @property
    def objects(self) -> Path:
        """What is in S3."""
        return self.path / "s3"

    @property
    def interface(self) -> str:
        """The sandbox's one network interface on this machine (netns level); at most 15 characters."""
        return f"mics{self.id}"


@dataclass(frozen=True)
class Process:
    pid: int
    start_ticks: int  # since boot; a pid alone is reused
    command: str

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


@dataclass(frozen=True)
class Leftovers:
    """What of a sandbox exists, each by name."""

    resources: tuple[str, ...] = ()  # in the emulator, not terminated
    processes: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(len(names) for names in asdict(self).values())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def acquire(folder: SandboxFolder) -> int | None:
    """Become the folder's owner; the lock lasts as long as the descriptor. None while another process owns it."""
    while True:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.path.chmod(0o700)
        try:
            lock = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # removed between the two lines
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if is_owned(folder):
                return None
            continue  # somebody only asked whether it is owned
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder.lock).st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)  # a sweep removed this lock file while we waited for it


def is_owned(folder: SandboxFolder) -> bool:
    """Does a live server own the folder?"""
    if not folder.lock.exists():
        return False
    with contextlib.suppress(FileNotFoundError), folder.lock.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def write_state(folder: SandboxFolder, state: dict[str, Any]) -> None:
    draft = folder.state.with_suffix(".tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(state, file)
    draft.replace(folder.state)


def read_state(folder: SandboxFolder) -> dict[str, Any] | None:
    """None where no server has ever become ready."""
    try:
        state = json.loads(folder.state.read_text())
    except FileNotFoundError:
        return None
    return state if isinstance(state, dict) else None


def process(pid: int) -> Process:
    """Raises ProcessLookupError where it does not live."""
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid, ticks, _command(pid))


def processes(folder: SandboxFolder) -> list[Process]:
    """Every live process of the sandbox, found by the mark in its environment or by the root that it sees.

    sshd overwrites its environment; it is known by the configuration file that it names.
    """
    mark = f"{MARK}={folder.id}".encode()
    ours = _root_of(os.getpid())
    found = []
    for pid in _pids():
        marked = (
            mark in _read(pid, "environ").split(b"\0")
            or _is_sshd_of(folder, _read(pid, "cmdline"))
            or (_root_of(pid) != ours and _root_mark(pid) == folder.id)
        )
        if marked and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                found.append(process(pid))
    return found


def leftovers(folder: SandboxFolder, resources: tuple[str, ...] = ()) -> Leftovers:
    """Everything of the sandbox on this machine; `resources` come from the emulator."""
    running = processes(folder)
    return Leftovers(
        resources=resources,
        processes=tuple(f"{p.pid} {p.command}" for p in running),
        namespaces=tuple(sorted({name for p in running for name in _foreign_namespaces(p.pid)})),
        mounts=tuple(_mounts(folder)),
        interfaces=(folder.interface,) if Path("/sys/class/net", folder.interface).exists() else (),
        folders=(str(folder.path),) if folder.path.exists() else (),
    )


def sweep(folder: SandboxFolder) -> None:
    """Remove everything of a sandbox that has no live server, but for the lock: the caller owns the folder."""
    deadline = time.monotonic() + _SWEEP_SECONDS
    while time.monotonic() < deadline:
        # another server is just finding out that the folder is taken: the lock, not this, decides between servers
        running = [one for one in processes(folder) if _SERVER not in _read(one.pid, "cmdline")]
        if not running:
            break
        for one in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
        time.sleep(0.02)
    for mount in reversed(_mounts(folder)):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    # deleting folders while something is mounted below them would delete what is mounted
    if not _mounts(folder):
        for path in folder.path.iterdir():
            if path != folder.lock:
                remove(path)
    while Path("/sys/class/net", folder.interface).exists() and time.monotonic() < deadline:
        subprocess.run(["ip", "link", "delete", folder.interface], check=False, capture_output=True)
        time.sleep(0.02)  # it goes by itself with the namespace of its peer


def remove(path: Path) -> None:
    """Remove a file or a tree; folders that nobody may enter are opened first."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for _ in range(2):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        _open(path)
        for parent, folders, _files in os.walk(path):  # top-down: a folder is opened before it is entered
            for name in folders:
                _open(Path(parent, name))


def _open(folder: Path) -> None:
    if not folder.is_symlink():
        with contextlib.suppress(OSError):
            folder.chmod(0o700)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit()) if os.path.isdir("/proc") else iter(())


def _read(pid: int, name: str) -> bytes:
    """b"" for a process that is gone or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:100]


def _is_sshd_of(folder: SandboxFolder, command: bytes) -> bool:
    """Also with the title that sshd gives itself, "sshd: /usr/sbin/sshd -D -f ... [listener]"."""
    words = command.replace(b"\0", b" ")
    program = os.path.basename(words.split(b" ", 1)[0])
    return program.startswith(b"sshd") and b" -f " + os.fsencode(folder.path) + b"/" in words


def _start_ticks(pid: int) -> int | None:
    """None for a process that is gone or a zombie."""
    # the name, in parentheses, may contain anything
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None


def _root_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _root_mark(pid: int) -> str:
    return _read(pid, f"root/{ROOT_MARK}").decode(errors="replace").strip()


def _foreign_namespaces(pid: int) -> list[str]:
    found = []
    for kind in ("net", "mnt", "pid", "uts", "ipc"):
        try:
            name = os.readlink(f"/proc/{pid}/ns/{kind}")
            own = os.readlink(f"/proc/self/ns/{kind}")
        except OSError:
            continue
        if name != own:
            found.append(name)
    return found


def _mounts(folder: SandboxFolder) -> list[str]:
    """Mount points below the folder in this process's own table."""
    try:
        table = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return []
    points = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split()[4]) for line in table.splitlines()]
    return [point for point in points if point == str(folder.path) or point.startswith(f"{folder.path}/")]
