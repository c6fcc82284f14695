"""What every program of the trainer has around its work: how it is told to stop, and how it ends."""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from mics.errors import RunFolderError, RunRefusedError
from mics.ranks import leave

REFUSED, UNSAVED, STOPPED = 2, 73, 75
STOPPED_UNSAVED = 128 + signal.SIGTERM  # as the shell says of a process that SIGTERM ended
ERROR_SECONDS = 60.0  # that a rank with an error waits for the others to have it too
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # torchrun passes each of them on to its ranks


def noted_signals() -> list[int]:
    """From now on, the numbers of the signals that asked this process to stop."""
    signals: list[int] = []
    for stop in STOP_SIGNALS:
        if signal.getsignal(stop) != signal.SIG_IGN:  # nohup
            signal.signal(stop, lambda number, _: signals.append(number))
    return signals


def refused(error: RunRefusedError) -> int:
    """The exit code for what every rank refuses, or none: one of each node says it."""
    return end(REFUSED, error, speaks=os.environ.get("LOCAL_RANK", "0") == "0")


def unwritable(error: RunFolderError) -> int:
    """The exit code where this rank alone cannot write: the others do not know, so they cannot leave with it."""
    sys.stderr.write(f"mics: {error}\n")
    return UNSAVED


def end(code: int, error: Exception, *, speaks: bool) -> int:
    """The exit code, for an error that all ranks have."""
    if speaks:
        sys.stderr.write(f"mics: {error}\n")  # in one piece: print would let another rank write into it
    if dist.is_initialized():
        leave(ERROR_SECONDS)
    return code
