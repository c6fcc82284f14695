"""How far, how fast, how long still: one line that is written over on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import math
import time
from typing import TextIO

TERMINAL_SECONDS, PIPE_SECONDS = 0.2, 10.0
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Meter:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._started, self._shown = time.monotonic(), -math.inf

    def show(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if done_bytes < total_bytes and now - self._shown < (TERMINAL_SECONDS if self._live else PIPE_SECONDS):
            return
        self._shown = now
        line = progress_line(done_bytes, total_bytes, now - self._started)
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def progress_line(done_bytes: int, total_bytes: int, seconds: float) -> str:
    """ "1.2 of 10.0 GB, 12 %, 43.0 MB/s, 3 min left". Pure."""
    size, unit = next(((size, unit) for size, unit in UNITS if total_bytes >= size), (1.0, "B"))
    speed = done_bytes / seconds if seconds else 0.0
    share = done_bytes / total_bytes if total_bytes else 1.0
    left = f", {duration((total_bytes - done_bytes) / speed)} left" if speed and share < 1 else ""
    return f"{done_bytes / size:.1f} of {total_bytes / size:.1f} {unit}, {share:.0%}, {speed / 1e6:.1f} MB/s{left}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
