"""Ctrl-C at the wrong moment: machines that were just started must not be forgotten."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # those that raise KeyboardInterrupt, as the CLI sets them


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """The first Ctrl-C inside the block takes effect at its end, the second at once; so do signals that count as it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    pending = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    # a handler of the caller's own stays in force
    deferred = [number for number in _SIGNALS if signal.getsignal(number) is signal.default_int_handler]
    for number in deferred:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in deferred:
            signal.signal(number, signal.default_int_handler)
        if pending:
            raise KeyboardInterrupt
