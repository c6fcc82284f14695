"""A window of steps, recorded: what ran when (torch.profiler) and, on a GPU, who held which memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mics.config import ProfileConfig
from mics.ranks import Place

MEMORY_EVENTS = 200_000  # allocations and frees, with their stacks: about 100 MB of file


class Window:
    """Records `config.steps` steps from `config.first_step` on one rank per node, into the run's folder on the node:

    profile/rank-<r>.json.gz       a Chrome trace: https://ui.perfetto.dev opens it
    profile/memory-rank-<r>.pickle with config.memory, on CUDA: https://docs.pytorch.org/memory_viz opens it
    """

    def __init__(self, config: ProfileConfig, folder: Path, place: Place, device: torch.device) -> None:
        self._config, self._folder, self._rank, self._device = config, folder / "profile", place.rank, device
        self._wanted = config.first_step > 0 and place.local_rank == 0
        self._memory = config.memory and device.type == "cuda"
        self._running: profile | None = None

    def at(self, step: int) -> None:
        """Call it before each step (from 1): the window opens before its first step and closes before the one after."""
        if self._running and step >= self._config.first_step + self._config.steps:
            self.close()
        if self._wanted and step >= self._config.first_step:  # a resumed run may start inside the window
            self._wanted = False
            if step < self._config.first_step + self._config.steps:
                self._open()

    def close(self) -> None:
        """Write what was recorded, if a window is open. Call it at the end: a run may end inside the window."""
        if not self._running:
            return
        self._running.stop()
        self._folder.mkdir(exist_ok=True)
        self._running.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        self._running = None
        if self._memory:
            target = self._folder / f"memory-rank-{self._rank}.pickle"
            # Underscored, but this is how torch's own guide "Understanding CUDA Memory Usage" has them called.
            torch.cuda.memory._dump_snapshot(str(target))  # type: ignore[no-untyped-call]  # torch
            torch.cuda.memory._record_memory_history(enabled=None)

    def _open(self) -> None:
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._running = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._running.start()
