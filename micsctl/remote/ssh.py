"""Host over SSH: Fabric connections, all behind the head's address through one gateway connection."""

from __future__ import annotations

import codecs
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko

from micsctl.cluster.model import Cluster, Node
from micsctl.home import ClusterFiles
from micsctl.remote.channel import CommandTimeout, ConnectionBroken, execute
from micsctl.remote.connection import SshSettings, StrictConnection, explain, is_transient
from micsctl.remote.copy import (
    RSYNC_FROM_BYTES,
    folder_bytes,
    have_rsync,
    rsync_command,
    tar_stream,
    untar_command,
)
from micsctl.remote.host import Host, HostError, Result
from micsctl.remote.openssh import route, ssh_command

__all__ = ["SshHost", "is_transient", "open_host", "open_hosts", "ssh_command", "try_connect"]

_FRESH_HANDSHAKES = 8  # sshd drops connections at random beyond 10 unauthenticated ones (MaxStartups)
_SILENCE_SECONDS = 15.0
_NO_SUCH_FILE = 44


@contextmanager
def open_hosts(cluster: Cluster, files: ClusterFiles, *, connect_timeout_seconds: float = 10) -> Iterator[list[Host]]:
    """The nodes in node order, each connected when it is first used, all closed at the end.

    Raises UsageError where this laptop lacks the cluster's key or host keys.
    """
    hosts = _hosts(cluster, files, connect_timeout_seconds)
    try:
        yield list(hosts)
    finally:
        for host in reversed(hosts):  # the head, which carries the others, last
            host.close()


@contextmanager
def open_host(
    cluster: Cluster, files: ClusterFiles, node: Node, *, connect_timeout_seconds: float = 10
) -> Iterator[Host]:
    """One node; the head is connected too where it is the way there."""
    with open_hosts(cluster, files, connect_timeout_seconds=connect_timeout_seconds) as hosts:
        yield next(host for host in hosts if host.index == node.index)


def try_connect(cluster: Cluster, files: ClusterFiles, node: Node, *, connect_timeout_seconds: float = 5) -> None:
    """Log in and out once. Raises HostError; `is_transient(error)` says whether to try again."""
    with open_host(cluster, files, node, connect_timeout_seconds=connect_timeout_seconds) as host:
        host.run("true", timeout_seconds=connect_timeout_seconds)


def _hosts(cluster: Cluster, files: ClusterFiles, connect_timeout_seconds: float) -> list[SshHost]:
    settings = SshSettings.load(cluster, files, connect_timeout_seconds)
    handshakes = threading.BoundedSemaphore(_FRESH_HANDSHAKES)
    hosts: dict[int, SshHost] = {}
    for node in cluster.nodes:  # the head comes first, so a jump is always there already
        address, jump = route(cluster, node)
        gateway = hosts[jump.index] if jump else None
        argv = ssh_command(cluster, files, node, connect_timeout_seconds=max(1, round(connect_timeout_seconds)))
        hosts[node.index] = SshHost(node, address, settings, gateway, handshakes, argv)
    return list(hosts.values())


class SshHost:
    """A node behind SSH; see `Host`. Safe to use from several threads at once."""

    def __init__(
        self,
        node: Node,
        address: str,
        settings: SshSettings,
        gateway: SshHost | None,
        handshakes: threading.BoundedSemaphore,
        ssh_argv: list[str],
    ) -> None:
        self._node, self._address, self._settings = node, address, settings
        self._gateway, self._handshakes, self._ssh_argv = gateway, handshakes, ssh_argv
        self._connection: StrictConnection | None = None
        self._transport: paramiko.Transport | None = None
        self._opening = threading.Lock()
        self._shell_prints = False

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def index(self) -> int:
        return self._node.index

    def run(self, command: str, *, timeout_seconds: float = 60, check: bool = True) -> Result:
        return self._run(command, timeout_seconds=timeout_seconds, check=check)

    def stream(self, command: str, on_line: Callable[[str], None]) -> int:
        lines = _Lines(on_line)
        code = self._execute(command, on_stdout=lines.feed, on_stderr=_ignore)
        lines.end()
        return code

    def write(self, path: str, text: str, *, mode: int = 0o600) -> None:
        data = text.encode()
        # The size is compared because a broken connection looks like the end of the file to the remote `cat`.
        self._run(
            f"""set -e
umask 077
path={shlex.quote(path)}
mkdir -p -- "$(dirname -- "$path")"
new=$(mktemp -- "$path.XXXXXX")
trap 'rm -f -- "$new"' EXIT
cat >"$new"
[ "$(wc -c <"$new")" -eq {len(data)} ]
chmod {mode:o} -- "$new"
mv -fT -- "$new" "$path"
""",
            stdin=[data],
        )

    def read(self, path: str) -> str | None:
        quoted = shlex.quote(path)
        result = self._run(f"[ -e {quoted} ] || exit {_NO_SUCH_FILE}; cat -- {quoted}", check=False)
        if result.exit_code == _NO_SUCH_FILE:
            return None
        self._require_success(f"cat {quoted}", result)
        return result.stdout

    def send_folder(self, source: Path, target: str) -> None:
        if not source.is_dir():
            raise NotADirectoryError(source)
        if folder_bytes(source) >= RSYNC_FROM_BYTES and have_rsync() and self._has_rsync(target):
            self._send_by_rsync(source, target)
        else:
            self._send_by_tar(source, target)

    def close(self) -> None:
        connection = self._connection  # no lock: closing must also end a connection that another thread is using
        if connection:
            connection.close()

    def _has_rsync(self, target: str) -> bool:
        """A login shell that prints breaks rsync's protocol, and the tar stream does not mind."""
        result = self._run(f"command -v rsync >/dev/null && mkdir -p -- {shlex.quote(target)}", check=False)
        return result.exit_code == 0 and not self._shell_prints

    def _send_by_rsync(self, source: Path, target: str) -> None:
        command = rsync_command(source, target, self._ssh_argv)
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise HostError(
                f"cannot copy {source} to {self.name}",
                f"rsync exit code {answer.returncode}\n{_tail(answer.stderr)}",
                transient=answer.returncode in (12, 30, 35, 255),  # broken stream, timeouts, ssh's own failure
            )

    def _send_by_tar(self, source: Path, target: str) -> None:
        self._run(untar_command(target), stdin=tar_stream(source), timeout_seconds=3600)

    def _run(
        self, command: str, *, stdin: Iterable[bytes] = (), timeout_seconds: float = 60, check: bool = True
    ) -> Result:
        stdout, stderr = bytearray(), bytearray()
        code = self._execute(
            command, on_stdout=stdout.extend, on_stderr=stderr.extend, stdin=stdin, timeout_seconds=timeout_seconds
        )
        result = Result(code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        if check:
            self._require_success(command, result)
        return result

    def _require_success(self, command: str, result: Result) -> None:
        if result.exit_code:
            raise HostError(
                f"a command failed on {self.name} with exit code {result.exit_code}",
                f"$ {_shortened(command)}\n{_tail(result.stderr) or _tail(result.stdout)}",
            )

    def _execute(
        self,
        command: str,
        *,
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
        stdin: Iterable[bytes] = (),
        timeout_seconds: float | None = None,
    ) -> int:
        """Exit code of `command`; its output without what the login shell printed before it."""
        mark = f"micsctl-{secrets.token_hex(8)}\n".encode()
        out, err = _AfterMark(mark, on_stdout), _AfterMark(mark, on_stderr)
        began = time.monotonic()
        transport = self._open()
        try:
            code = execute(
                _session(transport),
                _wrapped(command, mark.decode().strip(), timeout_seconds),
                on_stdout=out.feed,
                on_stderr=err.feed,
                stdin=stdin,
                timeout_seconds=timeout_seconds and timeout_seconds + 5,
                still_there=_Pulse(transport).check,
            )
        except CommandTimeout:
            raise self._too_late(command, timeout_seconds) from None
        except ConnectionBroken as error:
            raise self._broken(command, error) from None
        self._shell_prints = self._shell_prints or out.before_mark
        if timeout_seconds is not None and code in (124, 137) and time.monotonic() - began >= timeout_seconds:
            raise self._too_late(command, timeout_seconds)
        if code == -1 and not transport.is_active():
            raise self._broken(command, ConnectionBroken("the connection ended"))
        if not out.seen:
            raise HostError(
                f"the login shell of {self.name} ended with exit code {code} before it ran the command",
                _tail((out.text + err.text).decode(errors="replace")),
                next="look at what ~/.bashrc does there",
            )
        return code

    def _open(self) -> paramiko.Transport:
        """The live transport, after a handshake where there is none. Raises HostError."""
        with self._opening:
            if self._transport and self._transport.is_active():
                return self._transport
            if self._gateway:
                self._gateway._open()
            via = self._gateway._connection if self._gateway else None
            with self._handshakes:
                connection = StrictConnection(self._settings, self._address, via)
                try:
                    connection.open()
                except (OSError, EOFError, paramiko.SSHException) as error:
                    connection.client.close()
                    raise explain(error, self._settings, self.name, self._address) from None
            self._connection, self._transport = connection, connection.transport
            self._transport.set_keepalive(15)  # for address translators that forget a quiet connection
            return self._transport

    def _too_late(self, command: str, timeout_seconds: float | None) -> HostError:
        limit = f"within {timeout_seconds:g} s" if timeout_seconds is not None else "at all"
        return HostError(f"a command on {self.name} did not end {limit}", f"$ {_shortened(command)}")

    def _broken(self, command: str, error: Exception) -> HostError:
        return HostError(
            f"lost the connection to {self.name} while a command ran",
            f"$ {_shortened(command)}\n{str(error) or type(error).__name__}",
            next=f"micsctl status -n {self._settings.cluster}",
            transient=True,
        )


def _session(transport: paramiko.Transport) -> paramiko.Channel:
    try:
        return transport.open_session()
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise ConnectionBroken(str(error) or type(error).__name__) from None


class _Pulse:
    """Notices a node that stopped answering: TCP alone takes a quarter of an hour."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport, self._checked_at = transport, time.monotonic()

    def check(self) -> None:
        if time.monotonic() - self._checked_at > _SILENCE_SECONDS:
            self._transport.open_session(timeout=_SILENCE_SECONDS).close()
            self._checked_at = time.monotonic()


class _AfterMark:
    """Passes on what comes after the mark line."""

    def __init__(self, mark: bytes, sink: Callable[[bytes], object]) -> None:
        self._mark, self._sink = mark, sink
        self.text = b""  # so far, until the mark is seen
        self.seen = self.before_mark = False

    def feed(self, chunk: bytes) -> None:
        if self.seen:
            self._sink(chunk)
            return
        self.text += chunk
        before, found, after = self.text.partition(self._mark)
        if found:
            self.seen, self.before_mark, self.text = True, bool(before), b""
            if after:
                self._sink(after)


class _Lines:
    """Cuts bytes into lines; a character may be cut anywhere between two chunks."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line, self._rest = on_line, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + self._decoder.decode(chunk)).split("\n")
        for line in lines:
            self._on_line(line.removesuffix("\r"))

    def end(self) -> None:
        if rest := self._rest + self._decoder.decode(b"", final=True):
            self._on_line(rest)


def _wrapped(command: str, mark: str, timeout_seconds: float | None) -> str:
    """What the login shell is told: become a bash that reads no start-up file, print the mark, run the command.

    `timeout` ends the command on the node too; `exit $?` keeps the outer bash, so that a signal becomes 128 + n.
    """
    limit = f"timeout -k 5 {timeout_seconds} " if timeout_seconds is not None else ""
    script = f'echo {mark}; echo {mark} >&2; {limit}bash --norc -c "$1"; exit $?'
    return f"exec bash --norc -c {shlex.quote(script)} micsctl {shlex.quote(command)}"


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _shortened(command: str, characters: int = 200) -> str:
    first, *more = command.strip().splitlines()
    return first[:characters] + (" ..." if more or len(first) > characters else "")


def _ignore(chunk: bytes) -> None:
    """stderr of a streamed command: a caller that wants it writes `2>&1`."""
