"""What every program of the trainer has around its work: how it is told to stop, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mics import settings
from mics.config import RunConfig
from mics.errors import RunFolderError, RunRefusedError
from mics.ranks import Place, check_place, collective_timeout, join, leave, meet, node_names, place_of
from mics.watch import Watch

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


@contextmanager
def joined(run: RunConfig, folder: Path) -> Iterator[tuple[Place, torch.device, Watch]]:
    """This rank's place, its device, and the watch over all ranks, once they have met. Raises RunRefusedError."""
    place, timeout = place_of(os.environ), collective_timeout(run.train.limits)
    check_place(place, nodes=run.nodes, devices_per_node=run.devices_per_node)
    if run.train.deterministic:
        settings.deterministic()
    store = meet(place, os.environ, timeout=timeout)
    with Watch(store, place, node_names(run), run.train.limits, folder) as watch:
        yield place, join(place, store, timeout=timeout), watch


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
