"""Seconds of the parts of a step on this rank, without stopping the device to read a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn

Part = Literal["data", "compute", "forward", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)


class StepTimer:
    """Adds up the seconds of each part, from one `take` to the next.

    data       the host's own time: what it does there, or waits for
    compute    forward and backward passes, the waits for collectives that they do not hide included
    forward    of these, the blocks' forward passes, which wait for nothing; see `follow`
    optimizer  the optimizer's step alone: clipping waits for other ranks

    Wall-clock on CPU; on CUDA all but data lie between events on the current stream, and only `take` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        if self._on_cuda and part != "data":
            start = _event()
            yield
            self._events.append((part, start, _event()))
        else:
            began = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - began

    def follow(self, blocks: Iterable[nn.Module]) -> None:
        """Time the forward pass of each block, in place. Call it after `mics.recompute.prepare_blocks`.

        FSDP2's hooks, which wait for the gather, sit outside `forward`; what is computed again or compiled, inside it.
        """
        for block in blocks:
            block.forward = self._timed(block.forward)

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part("forward"):
                return forward(*arguments, **named)

        return timed

    def take(self) -> dict[Part, float]:
        """Seconds by part since the last call; then starts from zero."""
        for part, start, end in self._events:
            end.synchronize()
            self._seconds[part] += start.elapsed_time(end) / 1000
        self._events.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
    event.record()
    return event
