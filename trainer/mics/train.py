"""Train a language model over many devices so that little crosses the slow network between machines.

One process runs on each device. The processes of a partition group hold one copy of the model together, each a shard of
it; gradients cross to the other copies once per step. torchrun starts the processes:

  torchrun --nnodes NODES --nproc-per-node DEVICES -m mics.train --config run.json

What to train, on what and how stands in run.json. Its folder gets metrics.jsonl: one line of JSON per step. Started
again on the same run.json, a run goes on from its newest whole checkpoint.

Exit codes, each but 0 with a line on stderr that says why:
  0   done
  2   run.json, the model, the data or the checkpoint path cannot be used
  73  checkpoints or metrics.jsonl cannot be written
  74  a rank stood still for longer than limits.step_seconds; the folder `stall` has every rank's stack
  75  stopped by SIGTERM, Ctrl-C or a spot notice after the step in progress, with a checkpoint
  76  the loss or its gradient was not finite for limits.skipped_steps steps in a row
  143 stopped like 75, without a checkpoint: none is wanted, or the loss of that step is not finite
Anything else is a crash.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from mics import settings
from mics.board import Board
from mics.checkpoint import Outcome, Progress, SaveFailedError
from mics.config import RunConfig
from mics.data.batches import Batch
from mics.data.corpus import BadTokenError
from mics.data.feed import Feed
from mics.errors import RunFolderError, RunRefusedError
from mics.job import Job, prepare, say
from mics.metrics import RankStep, StepLog, exchange, expected, rank_step, record_of
from mics.models.built import IGNORED
from mics.notice import Notice
from mics.optim import learning_rate, optimizer_step, set_learning_rate
from mics.precision import LossScale
from mics.profile import Window
from mics.program import REFUSED, STOPPED, STOPPED_UNSAVED, UNSAVED, end, joined, noted_signals, refused, unwritable
from mics.ranks import Place, leave, node_names, together
from mics.sharding import boundary, clip
from mics.slow import Patience, in_words, slow_ranks
from mics.timer import StepTimer
from mics.validate import validation_loss

DIVERGED = 76
SummedLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class At(Protocol):
    """Told the step (from 1) and the phase that begin; `long`: the phase may take as long as a first step."""

    def __call__(self, step: int, phase: str, *, long: bool = False) -> None: ...


def nowhere(step: int, phase: str, *, long: bool = False) -> None:
    """For a loop that nobody watches."""


class DivergedError(Exception):
    """Too many steps in a row without a finite gradient."""


class StoppedUnsavedError(Exception):
    """Asked to stop after a step that no checkpoint holds."""


def step(
    model: nn.Module,
    summed_loss: SummedLoss,
    optimizer: AdamW,
    scale: LossScale,
    batches: Sequence[Batch],
    *,
    max_norm: float,
    timer: StepTimer,
) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer step: this rank's share of the mean loss, the gradient norm before clipping, and the step's valid
    tokens over all ranks. Where the norm is not finite, weights and optimizer stay as they are. No host reads.
    """
    tokens = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum()
    dist.all_reduce(tokens)
    share = torch.zeros((), dtype=torch.float64, device=tokens.device)
    with timer.part("compute"):
        for micro, (inputs, targets) in enumerate(batches):
            with boundary(model, last=micro == len(batches) - 1):
                loss = summed_loss(model, inputs, targets) / tokens
                (loss * scale.value).backward()  # type: ignore[no-untyped-call]  # torch
            share += loss.detach()
    norm = clip(model, max_norm, scale=scale.value)
    overflowed = (~torch.isfinite(norm)).float()
    with timer.part("optimizer"):
        optimizer_step(optimizer, overflowed)
    scale.update(overflowed)
    optimizer.zero_grad(set_to_none=True)
    return share, norm, tokens


def train(
    job: Job,
    folder: Path,
    *,
    at: At = nowhere,
    asked_to_stop: Callable[[], str | None] = lambda: None,
    board: Board | None = None,
) -> bool:
    """Train to the end, or to the end of the step in which any rank is asked to stop. Returns whether it came to the
    end. Raises DivergedError, StoppedUnsavedError and SaveFailedError, on every rank.

    asked_to_stop  who asks this rank to stop, if somebody does
    """
    run, t, progress, timer = job.run, job.run.train, job.start, job.timer
    path, first = folder / "metrics.jsonl", job.place.rank == 0
    log = StepLog(path, start=progress.step, steps=t.steps, board=board) if first else None
    known, patience, skipped_in_row, stopping, saves = expected(run, job.built), Patience(), 0, False, False
    window = Window(t.profile, folder, job.place, job.device)
    settings.quiet_garbage()
    job.interface.restart()
    feed = Feed(job.batches, samples=progress.samples, global_batch=run.global_batch, device=job.device)
    with feed:
        while progress.step < t.steps and not stopping:
            started, number = time.perf_counter(), progress.step + 1
            window.at(number)
            at(number, "data")
            with timer.part("data"):
                batches = feed.next()
            at(number, "compute")
            lr = scheduled(run, progress.step)
            set_learning_rate(job.optimizer, lr)
            scale = job.scale.value.clone()
            share, norm, tokens = step(
                job.model, job.built.summed_loss, job.optimizer, job.scale, batches, max_norm=t.clip, timer=timer
            )
            progress = Progress(number, feed.samples)

            loss, grad_norm = float(share), float(norm)
            at(number, "exchange")
            dist.barrier()  # every byte of this step has left its node
            seconds = time.perf_counter() - started
            ranks = exchange(_mine(job, loss, stopping=asked_to_stop() is not None), job.device)
            stopping = any(rank.stopping for rank in ranks)
            skipped = not math.isfinite(grad_norm)
            skipped_in_row = skipped_in_row + 1 if skipped else 0
            record = record_of(
                ranks,
                run,
                known,
                step=number,
                samples=progress.samples,
                tokens=int(tokens),
                grad_norm=grad_norm,
                lr=lr,
                step_seconds=seconds,
                loss_scale=float(scale),
                skipped=skipped,
                skipped_in_row=skipped_in_row,
            )
            last = stopping or number == t.steps
            if due(number, every=t.validation.every, last=number == t.steps):
                at(number, "validation", long=True)
                record["validation_loss"] = validation_loss(job)
                _mine(job, loss, stopping=stopping)  # not part of the next step
            if log:
                log.write(record)
                for slow in patience.lasting(slow_ranks(ranks, run.grid, step_seconds=seconds)):
                    log.note(in_words(slow, node_names(run)))
            if skipped_in_row >= t.limits.skipped_steps:
                finish(job, at, number)  # the last good checkpoint may still be on its way
                raise DivergedError(
                    f"the gradient was not finite for {skipped_in_row} steps in a row (step {number}, loss "
                    f"{record['loss']}); the weights are those of step {number - skipped_in_row}. "
                    "Try a lower lr, a longer warmup or another precision"
                )
            # Weights that give no finite loss would push a good checkpoint out.
            saves = job.saver is not None and record["loss"] is not None
            if job.saver and saves and due(number, every=t.checkpoint.every, last=last):
                at(number, "checkpoint", long=True)
                report(job.saver.save(job.state, progress), job.place)
            if stopping:
                _say_why(asked_to_stop(), number)
            settings.collect(number)
            job.interface.restart()
    window.close()
    finish(job, at, progress.step)
    if stopping and not saves and progress.step < t.steps:
        reason = "its loss is not finite" if job.saver else "train.checkpoint.every is 0"
        raise StoppedUnsavedError(f"stopped after step {progress.step}, which no checkpoint holds: {reason}")
    return progress.step >= t.steps


def _mine(job: Job, loss: float, *, stopping: bool) -> RankStep:
    meter = job.connection.meter
    exposed_seconds = meter.take_exposed_seconds()
    return rank_step(loss, stopping, job.interface.take(), job.timer.take(), meter.take(), exposed_seconds)


def scheduled(run: RunConfig, done: int) -> float:
    """The learning rate of the step after `done` steps. Pure."""
    t = run.train
    return learning_rate(done, peak=t.lr, warmup=t.warmup, steps=t.steps, schedule=t.schedule, decay=t.decay)


def due(step: int, *, every: int, last: bool) -> bool:
    """Whether something is due after `step`: every so many steps and after the last; 0 = never. Pure."""
    return every > 0 and (last or step % every == 0)


def report(outcomes: Iterable[Outcome], place: Place) -> None:
    """Say what went wrong with the saves that have ended."""
    for outcome in outcomes:
        if outcome.problem:
            say(f"checkpoint of step {outcome.step}: {outcome.problem}", place)


def finish(job: Job, at: At, step: int) -> None:
    """Wait for the last save. Raises SaveFailedError."""
    if job.saver:
        at(step, "last checkpoint", long=True)
        report(job.saver.finish(), job.place)


def _say_why(why: str | None, step: int) -> None:
    if why:
        sys.stderr.write(f"mics: {why}: stopping after step {step}\n")


def read_run(path: Path) -> RunConfig:
    try:
        run = RunConfig.read(path)
        _ = run.grid, run.reshard  # ValueError where these nodes cannot have them
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{path}: {error}") from error
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mics.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="run.json", help="the run; written by micsctl launch"
    )
    config: Path = parser.parse_args(arguments).config
    signals = noted_signals()
    try:
        done = _run(read_run(config), config.parent, signals)
    except RunRefusedError as error:
        return refused(error)
    except SaveFailedError as error:
        return end(UNSAVED, error, speaks=dist.get_rank() == 0)
    except DivergedError as error:
        return end(DIVERGED, error, speaks=dist.get_rank() == 0)
    except StoppedUnsavedError as error:
        return end(STOPPED_UNSAVED, error, speaks=dist.get_rank() == 0)
    except RunFolderError as error:
        return unwritable(error)
    except BadTokenError as error:  # this rank alone knows, so the others cannot leave with it
        sys.stderr.write(f"mics: {error}\n")
        return REFUSED
    leave()
    return 0 if done else STOPPED


def _run(run: RunConfig, folder: Path, signals: Sequence[int]) -> bool:
    launcher = os.getppid()
    with joined(run, folder) as (place, device, watch):
        notice = Notice(os.environ) if place.local_rank == 0 else None
        job = prepare(run, place, device)
        watch.follow(job.connection.meter.current)
        board = together(lambda: _board(job, folder), place)

        def asked_to_stop() -> str | None:
            if signals:
                return signal.Signals(signals[0]).name
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher:
                return "torchrun has died"  # nobody would end these processes, or know of them
            return notice.arrived if notice else None

        try:
            return train(job, folder, at=watch.at, asked_to_stop=asked_to_stop, board=board)
        finally:
            if notice:
                notice.stop()
            if board:
                board.close()


def _board(job: Job, folder: Path) -> Board | None:
    wanted = job.run.train.tensorboard and job.place.rank == 0
    return Board(folder / "tensorboard", start=job.start.step) if wanted else None


if __name__ == "__main__":
    sys.exit(main())
