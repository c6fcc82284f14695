"""Ctrl-C, and what counts as Ctrl-C: SIGTERM, and SIGHUP when the terminal closes."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from micsctl.errors import ExitCode

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def count_as_ctrl_c() -> tuple[signal.Signals, ...]:
    """Those that now raise KeyboardInterrupt in the main thread; what is ignored stays so: nohup ignores SIGHUP."""
    heard = tuple(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)
    for number in heard:
        signal.signal(number, signal.default_int_handler)
    return heard


@contextmanager
def held_back() -> Iterator[list[int]]:
    """None of them stops what happens inside, nor a program started there. Those that came are then in the list."""
    came: list[int] = []
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in heard}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, heard)  # which a program that is started inherits
    try:
        yield came
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore(heard: Iterable[signal.Signals]) -> None:
    for number in heard:
        signal.signal(number, signal.SIG_IGN)


def leave_at_once(heard: Sequence[signal.Signals]) -> None:
    """For a command that is over: what still runs are threads that end, and one more Ctrl-C does not wait for them."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(ExitCode.INTERRUPTED)

    # when the interpreter ends it gives handlers of ours, but not SIG_IGN, back to the system, which would kill us
    atexit.register(ignore, heard)
    for number in heard:
        signal.signal(number, leave)
