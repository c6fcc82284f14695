"""One command on one open SSH channel: feed it, read it, end with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import paramiko

_CHUNK_BYTES = 1 << 16
_TICK_SECONDS = 0.25
_AFTER_EXIT_SECONDS = 1.0
_START_SECONDS = 30.0

Sink = Callable[[bytes], object]


class CommandTimeout(Exception):
    """The command did not end in time; its channel is closed."""


class ConnectionBroken(Exception):
    """The connection ended, or went silent, before the command did."""


def execute(
    channel: paramiko.Channel,
    command: str,
    *,
    on_stdout: Sink,
    on_stderr: Sink,
    stdin: Iterable[bytes] = (),
    timeout_seconds: float | None = None,
    still_there: Callable[[], None] = lambda: None,
) -> int:
    """Run `command` on a fresh session channel and return its exit code; -1 where a signal ended it.

    stdin         sent whole, then end of file; the command may end without reading it
    still_there   called at every idle tick; raises where the other side no longer answers

    Ends when the command does, even where a child it left behind keeps its output open. Raises CommandTimeout or
    ConnectionBroken. The channel is closed in every case, Ctrl-C included; a remote command without a terminal gets
    no signal from that, and ends when it next writes.
    """
    expired = threading.Event()
    try:
        with _closing_after(channel, timeout_seconds or _START_SECONDS, expired):
            _start(channel, command, stdin, expired)
            if timeout_seconds is not None:
                _read(channel, on_stdout, on_stderr, still_there, expired)
        if timeout_seconds is None:
            _read(channel, on_stdout, on_stderr, still_there, expired)
    finally:
        channel.close()
    if expired.is_set():
        raise CommandTimeout
    return channel.exit_status


def _start(channel: paramiko.Channel, command: str, stdin: Iterable[bytes], expired: threading.Event) -> None:
    with _explained(expired):
        channel.exec_command(command)
    channel.settimeout(_START_SECONDS)  # for each chunk: a reader that takes nothing for so long is gone
    for chunk in stdin:
        with _explained(expired):
            try:
                channel.sendall(chunk)
            except OSError:
                if channel.exit_status_ready():  # it ended without reading; its exit code says why
                    return
                raise
    with _explained(expired):
        channel.shutdown_write()


def _read(
    channel: paramiko.Channel,
    on_stdout: Sink,
    on_stderr: Sink,
    still_there: Callable[[], None],
    expired: threading.Event,
) -> None:
    channel.settimeout(_TICK_SECONDS)
    last_output = time.monotonic()
    open_for_output = True
    while open_for_output:
        with _explained(expired):
            try:
                chunk = channel.recv(_CHUNK_BYTES)
                open_for_output = bool(chunk)
            except TimeoutError:
                chunk = b""
                quiet_seconds = time.monotonic() - last_output
                open_for_output = not (channel.exit_status_ready() and quiet_seconds > _AFTER_EXIT_SECONDS)
                still_there()
        if chunk:
            on_stdout(chunk)
            last_output = time.monotonic()
        while channel.recv_stderr_ready():
            on_stderr(channel.recv_stderr(_CHUNK_BYTES))
    while not channel.status_event.wait(_TICK_SECONDS):
        with _explained(expired):
            still_there()
    while channel.recv_stderr_ready():
        on_stderr(channel.recv_stderr(_CHUNK_BYTES))


@contextmanager
def _explained(expired: threading.Event) -> Iterator[None]:
    """Around what touches the channel, and not around the caller's own sinks and sources, which may fail as well."""
    try:
        yield
    except (paramiko.SSHException, EOFError, OSError) as error:
        if expired.is_set():
            raise CommandTimeout from None
        raise ConnectionBroken(str(error) or type(error).__name__) from None


@contextmanager
def _closing_after(channel: paramiko.Channel, seconds: float, expired: threading.Event) -> Iterator[None]:
    """Close the channel when the block takes longer; paramiko's waits have no timeout of their own everywhere."""

    def expire() -> None:
        expired.set()
        channel.close()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
