"""The batches of the next step, made while this one runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from mics.data.batches import Batch

Make = Callable[[int], Sequence[Batch]]


class Feed:
    """One step ahead of the trainer, in a thread. `samples` is its whole state: the first sample of the next step.

    make          the batches of this rank in the step whose first sample is given, on the CPU
    global_batch  sequences of one step over all ranks

    An error of `make` is raised by the `next` that would have returned its batches. Use it as a context manager, or
    close it.
    """

    def __init__(self, make: Make, *, samples: int, global_batch: int, device: torch.device) -> None:
        self.samples = samples
        self._make, self._global_batch, self._device = make, global_batch, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mics-feed")
        self._coming = self._begin()

    def next(self) -> list[Batch]:
        """The batches of this step on the device. The copies to a GPU have been started, not awaited."""
        batches = self._coming.result()
        self.samples += self._global_batch
        self._coming = self._begin()
        return [
            (inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True))
            for inputs, targets in batches
        ]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> Future[list[Batch]]:
        return self._thread.submit(_made, self._make, self.samples, pinned=self._device.type == "cuda")


def _made(make: Make, samples: int, *, pinned: bool) -> list[Batch]:
    """Only from pinned memory does a copy to a GPU leave the CPU free."""
    batches = make(samples)
    return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches] if pinned else list(batches)
