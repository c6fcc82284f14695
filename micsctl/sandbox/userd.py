"""Runs one node of the process level: its sshd, its user data, and everything that they start. Standard library only.

    python -I userd.py FD FOLDER ADDRESS PORT SSHD      (environment and current folder: the node's own)

FD is one end of a socketpair with the server. It carries JSON lines: `{"event": "running"}` to the server, and
`{"listen": "127.177.0.1"}` or `{"unlisten": ...}` from it. End of file, SIGTERM (the shutdown shim) and the end of sshd
all end the node: every process below this one is killed, then this one exits. So the kernel's closing of the server's
end is what cleans up, however the server dies.

On Linux this process is a child subreaper: a daemon that leaves its session and its parent still cannot leave the node.
macOS has neither subreapers nor /proc. There the processes are found by `ps`, which is untested.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER_VARIABLE = "MICS_NODE_FOLDER"  # in the environment of every process of a node
_LINUX = sys.platform == "linux"
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 36, 38, 24
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_CHROOT = 6, 7, 18  # what an sshd that runs as root cannot do without


def give_up_privileges() -> None:
    """Adopt orphans below this process, gain no privilege by exec, and as root keep only what sshd needs.

    A root node can so neither mount, nor reboot, nor load modules, nor touch network devices. Raises OSError.
    """
    if not _LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    checked(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if os.geteuid() != 0:
        return
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kept = int(status["CapPrm"], 16) & (1 << _CAP_SETGID | 1 << _CAP_SETUID | 1 << _CAP_SYS_CHROOT)
    for capability in range(int(status["CapBnd"], 16).bit_length()):
        if not kept >> capability & 1:
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the next line holds even where this is refused
    # version 3 of the header; effective, permitted, inheritable for capabilities 0..31, then 32..63.
    # With no_new_privs set, exec cannot add to the permitted set, not even for user id 0.
    checked(libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)))


class _Process(NamedTuple):
    parent: int
    title: str  # the command line, words separated by blanks
    environment: tuple[str, ...]


def kill_all(folder: str, *, root: int | None = None, patience_seconds: float = 10.0) -> None:
    """Kill the processes of every node at or below `folder`, and those below process `root`, until none is left.

    Processes of a node are known by their environment, an sshd (which overwrites its environment) by the configuration
    file that it names; what descends from either belongs to it.
    """
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        processes = _processes()
        found = {pid for pid, process in processes.items() if _belongs(process, folder)} | ({root} if root else set())
        victims = (found | _descendants(processes, found)) - {os.getpid()}
        if not victims:
            return
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if root:
            list(_reaped())
        time.sleep(0.01)


def _processes() -> dict[int, _Process]:
    """Everything that runs here and is no zombie. Other users' processes have no environment to see."""
    if not _LINUX:
        # -E appends the environment to the command line, where the system lets it be seen
        command = ["ps", "-axwwEo", "pid=,ppid=,stat=,command="]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        rows = [line.split(None, 3) for line in lines]
        return {
            int(pid): _Process(int(parent), title, tuple(title.split()))
            for pid, parent, state, title in (row for row in rows if len(row) == 4)
            if not state.startswith("Z")
        }
    table = dict[int, _Process]()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # the name, in parentheses, may hold blanks and parentheses
            state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                table[int(pid)] = _Process(int(parent), " ".join(_words(pid, "cmdline")), _words(pid, "environ"))
    return table


def _words(pid: str, name: str) -> tuple[str, ...]:
    try:
        return tuple(os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes()).split("\0"))
    except PermissionError:
        return ()


def _belongs(process: _Process, folder: str) -> bool:
    prefix, name = folder.rstrip("/") + "/", FOLDER_VARIABLE + "="
    program = os.path.basename(process.title.split(" ", 1)[0])
    return (program.startswith("sshd") and f" -f {prefix}" in process.title) or any(
        f"{word.removeprefix(name)}/".startswith(prefix) for word in process.environment if word.startswith(name)
    )


def _descendants(processes: dict[int, _Process], roots: set[int]) -> set[int]:
    below, size = set(roots), -1
    while len(below) != size:
        size = len(below)
        below |= {pid for pid, process in processes.items() if process.parent in below}
    return below - roots


def _reaped() -> Iterator[tuple[int, int]]:
    """Process id and exit code of every child that has ended, adopted ones too."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


class _Node:
    def __init__(self, folder: Path, address: str, port: int, sshd: str) -> None:
        self._folder, self._address, self._port, self._sshd = folder, address, port, sshd
        self._console = folder / "console.log"
        self._make_host_keys()
        self._main = self._start_sshd(address)
        self._public = dict[str, subprocess.Popen[bytes]]()
        self._user_data = self._start_user_data()

    def note(self, text: str) -> None:
        with self._console.open("a") as console:
            console.write(text + "\n")

    def _make_host_keys(self) -> None:
        """Host keys, and the block by which cloud-init announces them on the console."""
        lines = dict[str, list[str]](FINGERPRINTS=[], KEYS=[])
        for kind in ("ecdsa", "ed25519"):
            key = self._folder / f"ssh_host_{kind}_key"
            comment = f"root@{os.environ['MICS_NODE']}"
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(key)], check=True)
            shown = subprocess.run(["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True)
            lines["FINGERPRINTS"].append(shown.stdout.strip())
            lines["KEYS"].append(Path(f"{key}.pub").read_text().strip())
        # bare, or through logger(1), depending on cloud-init's version: every second node does the one
        prefix = f"<14>{time.strftime('%b %e %T')} cloud-init: ec2: " if int(self._address.split(".")[-1]) % 2 else ""
        for title, keys in lines.items():
            block = [f"-----BEGIN SSH HOST KEY {title}-----", *keys, f"-----END SSH HOST KEY {title}-----"]
            self.note("\n".join(prefix + line for line in block))

    def _start_sshd(self, address: str) -> subprocess.Popen[bytes]:
        config, log = str(self._folder / "sshd_config"), str(self._folder / "sshd.log")
        command = [self._sshd, "-D", "-f", config, "-E", log, "-o", f"ListenAddress={address}:{self._port}"]
        return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)

    def _start_user_data(self) -> subprocess.Popen[bytes] | None:
        script = self._folder / "user-data"
        if not script.is_file():
            return None
        if not script.read_bytes().startswith(b"#!"):
            self.note("cloud-init: the user data is not a script")
            return None
        with self._console.open("ab") as output:
            try:
                return subprocess.Popen(
                    [script], start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            except OSError as error:
                self.note(f"cloud-init: the user data cannot be run: {error.strerror}")
                return None

    def listen(self, address: str) -> None:
        """Reach this node through `address` too. Whoever had it before is given two seconds to let it go."""
        deadline = time.monotonic() + 2
        while not self._is_free(address) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._public[address] = self._start_sshd(address)

    def _is_free(self, address: str) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, self._port))
            except OSError:
                return False
            return True

    def unlisten(self, address: str) -> None:
        """Only the listener ends; sessions that came through it go on, as behind a moved Elastic IP."""
        if listener := self._public.pop(address, None):
            os.kill(listener.pid, signal.SIGKILL)

    def ended(self, pid: int, code: int) -> bool:
        """Take note of a child's end. True when it was the sshd that stands for the machine."""
        if self._user_data and pid == self._user_data.pid:
            self.note(f"cloud-init: finished, user data ended with {code}")
        failed = [address for address, listener in self._public.items() if listener.pid == pid]
        for address in failed:
            del self._public[address]
        if pid == self._main.pid or failed:
            log = (self._folder / "sshd.log").read_text(errors="replace").splitlines()
            self.note("\n".join([f"sshd ended with {code}", *log[-5:]]))
        return pid == self._main.pid


def _serve(node: _Node, server: socket.socket, wakeup: int) -> None:
    """Until the node has to end."""
    buffer = b""
    inputs: list[socket.socket | int] = [server, wakeup]
    while True:
        readable, _, _ = select.select(inputs, [], [])
        if wakeup in readable and signal.SIGTERM in os.read(wakeup, 4096):
            return
        if any(node.ended(pid, code) for pid, code in _reaped()):
            return
        if server in readable:
            received = server.recv(1 << 16)
            if not received:
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "unlisten" in message:
                    node.unlisten(message["unlisten"])
                if "listen" in message:
                    node.listen(message["listen"])


def main() -> None:
    number, folder, address, port, sshd = sys.argv[1:]
    server = socket.socket(fileno=int(number))
    server.set_inheritable(False)
    give_up_privileges()
    wakeup, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number_of_signal in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number_of_signal, lambda *_: None)  # the wake-up pipe tells which one came
    try:
        Path(folder, "userd.pid").write_text(str(os.getpid()))
        node = _Node(Path(folder), address, int(port), sshd)
        server.sendall(b'{"event": "running"}\n')
        _serve(node, server, wakeup)
    finally:
        kill_all(folder, root=os.getpid())


if __name__ == "__main__":
    main()
