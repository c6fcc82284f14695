"""Saving while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from mics.checkpoint.agree import on_first_rank, readable_reason
from mics.checkpoint.marks import Identity, Progress
from mics.checkpoint.states import TrainState, part_of_this_rank, tensors_of
from mics.checkpoint.stores import open_store
from mics.checkpoint.writing import SaveFailedError, claim, remove_old, write_checkpoint
from mics.config import CheckpointConfig
from mics.errors import RunRefusedError

FAILURES_IN_A_ROW = 2  # end the run
_WRITE_TIMEOUT = timedelta(hours=1)  # for the slowest rank to write its part


@dataclass(frozen=True)
class Outcome:
    """How one save went.

    checkpoint      where it lies; None where the save failed
    staging_seconds training stood still: the wait for the save before, and the copy of this one
    seconds         from the copy to the mark
    problem         one line: why it failed, or what could not be removed afterwards
    """

    step: int
    checkpoint: str | None
    staging_seconds: float
    seconds: float
    problem: str | None = None


class Saver:
    """Writes checkpoints below `folder`, one at a time.

    In the background the tensors that this rank writes are first copied to the host: 1/n of weights and optimizer
    state, memory that is kept for the next save (pinned where there is a GPU). Writing and its collectives then run on
    a thread and a gloo group of their own. In the foreground nothing is copied.

    Every method is collective over all ranks. The folder is this saver's until another one is made for it.
    """

    def __init__(self, folder: str, identity: Identity, config: CheckpointConfig) -> None:
        self._store = open_store(folder)
        self._identity, self._config = identity, config
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
        self._owner = on_first_rank(lambda: claim(self._store), self._group, RunRefusedError)
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, False, gpu)) if config.background else None
        self._pending: Future[Outcome] | None = None
        self._failures = 0

    @property
    def writing(self) -> bool:
        """Whether this rank is still at work on the last save."""
        return self._pending is not None and not self._pending.done()

    def save(self, state: TrainState, progress: Progress) -> list[Outcome]:
        """Save; returns how the saves went that have ended since the last call: this one's too in the foreground.

        Raises SaveFailedError after the second failure in a row. After the first one the run goes on.
        """
        started = time.perf_counter()
        ended = self._wait()
        mine = part_of_this_rank(tensors_of(state))
        if self._stager is None:
            self._pending = Future()
            self._write(mine, progress, started, self._pending)
            return ended + self._wait()
        staged = self._stager.stage(mine)
        assert isinstance(staged, dict)  # not a future: use_async_staging is off
        self._pending = Future()
        # A daemon: where the run crashes, nobody waits for a write whose other ranks may be gone.
        work = (staged, progress, started, self._pending)
        threading.Thread(target=self._write, args=work, name="mics-checkpoint", daemon=True).start()
        return ended

    def finish(self) -> list[Outcome]:
        """Wait for the last save. Raises SaveFailedError where it failed: the run ends without what it was for."""
        ended = self._wait()
        failed = [outcome for outcome in ended if outcome.checkpoint is None]
        if failed:
            raise SaveFailedError(f"the last checkpoint (step {failed[-1].step}) was not saved: {failed[-1].problem}")
        return ended

    def _wait(self) -> list[Outcome]:
        if self._pending is None:
            return []
        outcome, self._pending = self._pending.result(), None
        self._failures = self._failures + 1 if outcome.checkpoint is None else 0
        if self._failures >= FAILURES_IN_A_ROW:
            raise SaveFailedError(f"{self._failures} checkpoints in a row were not saved, the last: {outcome.problem}")
        return [outcome]

    def _write(
        self, tensors: Mapping[str, Tensor], progress: Progress, started: float, result: Future[Outcome]
    ) -> None:
        staged = time.perf_counter()
        try:
            problem = None
            folder = write_checkpoint(self._store, tensors, progress, self._identity, self._group, self._owner)
            if dist.get_rank() == 0:
                problem = self._remove_old(folder)
            written = self._store.path(folder)
            seconds = time.perf_counter() - staged
            result.set_result(Outcome(progress.step, written, staged - started, seconds, problem))
        except SaveFailedError as error:
            seconds = time.perf_counter() - staged
            result.set_result(Outcome(progress.step, None, staged - started, seconds, str(error)))
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that trains)
            result.set_exception(error)

    def _remove_old(self, new: str) -> str | None:
        try:
            remove_old(self._store, new, self._config.keep, self._config.keep_every)
        except (OSError, RunRefusedError) as error:
            return f"an older checkpoint could not be removed: {readable_reason(error)}"
        return None
