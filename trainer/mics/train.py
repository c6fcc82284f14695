"""Train a language model over many devices so that little crosses the slow network between machines.

One process runs on each device. The processes of a partition group hold one copy of the model together, each a shard of
it; gradients cross to the other copies once per step. torchrun starts the processes:

  torchrun --nnodes NODES --nproc-per-node DEVICES -m mics.train --config run.json

What to train, on what and how stands in run.json. Its folder gets metrics.jsonl: one line of JSON per step.

Exit codes: 0 done; 2 run.json, the data or the checkpoint path cannot be used (one line on stderr says why);
75 stopped by SIGTERM after the step in progress, with a checkpoint; anything else is a crash.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from mics.checkpoint import Progress, save
from mics.config import RunConfig
from mics.errors import RunRefusedError
from mics.job import Batch, Job, next_batches, node_path, prepare, valid_tokens
from mics.metrics import RankStep, StepLog, exchange, memory_bytes, record_of
from mics.models.gpt import summed_loss
from mics.optim import learning_rate, set_learning_rate
from mics.ranks import check_place, join, leave, place_of
from mics.sharding import boundary, clip

REFUSED = 2
STOPPED = 75  # EX_TEMPFAIL: start it again and it goes on


def step(
    model: nn.Module, optimizer: AdamW, batches: Sequence[Batch], tokens: Tensor, max_norm: float
) -> tuple[Tensor, Tensor]:
    """One optimizer step: this rank's share of the mean loss, and the gradient norm before clipping. No host reads.

    tokens  valid tokens of the step over all ranks and micro-steps, a scalar
    """
    share = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for micro, (inputs, targets) in enumerate(batches):
        with boundary(model, last=micro == len(batches) - 1):
            loss = summed_loss(model, inputs, targets) / tokens
            loss.backward()  # type: ignore[no-untyped-call]  # torch
        share += loss.detach()
    norm = clip(model, max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share, norm


def train(job: Job, folder: Path, signals: Sequence[int]) -> bool:
    """Train to the end, or to the end of the step in which a signal arrived. Returns whether it came to the end."""
    run, t, progress, stopping = job.run, job.run.train, job.start, False
    log = StepLog(folder / "metrics.jsonl", start=progress.step, steps=t.steps) if job.place.rank == 0 else None
    job.interface.restart()
    while progress.step < t.steps and not stopping:
        started = time.perf_counter()
        lr = learning_rate(progress.step, peak=t.lr, warmup=t.warmup, steps=t.steps)
        set_learning_rate(job.optimizer, lr)
        batches = next_batches(job, progress)
        tokens = valid_tokens(batches)
        share, norm = step(job.model, job.optimizer, batches, tokens, t.clip)
        progress = Progress(progress.step + 1, progress.samples + run.global_batch)

        loss, grad_norm, stages = float(share), float(norm), job.connection.meter.take()
        dist.barrier()  # every byte of this step has left its node
        seconds = time.perf_counter() - started
        mine = RankStep(loss, bool(signals), job.interface.take(), memory_bytes(), stages)
        ranks = exchange(mine, job.device)
        record = record_of(ranks, run, progress, tokens=int(tokens), grad_norm=grad_norm, lr=lr, step_seconds=seconds)
        if not math.isfinite(record["loss"] + grad_norm):
            raise FloatingPointError(f"step {progress.step}: loss {record['loss']}, gradient norm {grad_norm}")
        if log:
            log.write(record)
        stopping = any(rank.stopping for rank in ranks)
        if due(progress.step, every=t.checkpoint.every, last=stopping or progress.step == t.steps):
            save(node_path(run.checkpoint_folder), job.model, job.optimizer, progress, t.shape)
            job.interface.restart()
    return progress.step >= t.steps


def due(step: int, *, every: int, last: bool) -> bool:
    """Whether a checkpoint is due after `step`: every so many steps and after the last; 0 = never. Pure."""
    return every > 0 and (last or step % every == 0)


def read_run(path: Path) -> RunConfig:
    try:
        return RunConfig.read(path)
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{path}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mics.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="run.json", help="the run; written by micsctl launch"
    )
    config: Path = parser.parse_args(arguments).config
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        run = read_run(config)
        place = place_of(os.environ)
        check_place(place, nodes=run.nodes, devices_per_node=run.devices_per_node)
        device = join(place)
        try:
            done = train(prepare(run, place, device), config.parent, signals)
        except RunRefusedError:  # prepare refuses on every rank or on none
            leave()
            raise
    except RunRefusedError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"mics: {error}\n")  # in one piece: print would let another rank write into its line
        return REFUSED
    leave()
    return 0 if done else STOPPED


if __name__ == "__main__":
    sys.exit(main())
