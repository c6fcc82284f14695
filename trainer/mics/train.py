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
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from mics.checkpoint import Progress, check_shared, load, save, to_resume
from mics.config import RunConfig
from mics.data import Corpus, check_corpus, deal, find_files, load_batch, open_corpus
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.metrics import InterfaceCounter, RankStep, StepLog, exchange, memory_bytes, record_of, start_log
from mics.models.gpt import GPT, IGNORED, build_on_meta, summed_loss
from mics.optim import adamw, learning_rate, set_learning_rate
from mics.paths import on_this_node
from mics.precision import DTYPES
from mics.ranks import Place, check_place, differing_nodes, join, leave, place_of, together
from mics.sharding import Connection, apply, boundary, check_replicas, clip, connect

REFUSED = 2
STOPPED = 75  # EX_TEMPFAIL: start it again and it goes on

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """Everything that training needs, made by `prepare`."""

    run: RunConfig
    place: Place
    device: torch.device
    connection: Connection
    model: GPT
    optimizer: AdamW
    corpus: Corpus
    start: Progress
    global_batch: int  # sequences per optimizer step, over all ranks


def train(job: Job, folder: Path, stop: list[int]) -> bool:
    """Train to the end, or to the end of the step in which `stop` got a signal. Returns whether it came to the end."""
    t, progress, rank0 = job.run.train, job.start, job.place.rank == 0
    log = StepLog(folder / "metrics.jsonl", start=progress.step, steps=t.steps) if rank0 else None
    interface = InterfaceCounter(job.run.interface if job.place.local_rank == 0 else None)
    stopping = False
    while progress.step < t.steps and not stopping:
        started = time.perf_counter()
        lr = learning_rate(progress.step, peak=t.lr, warmup=t.warmup, steps=t.steps)
        set_learning_rate(job.optimizer, lr)
        batches = next_batches(job, progress)
        tokens = valid_tokens(batches)
        loss, norm = step(job.model, job.optimizer, batches, tokens, t.clip)
        progress = Progress(progress.step + 1, progress.samples + job.global_batch)

        share, grad_norm, stages = float(loss), float(norm), job.connection.meter.take()
        dist.barrier()  # all bytes of this step have left their nodes
        mine = RankStep(share, bool(stop), interface.take(), memory_bytes(), stages)
        step_seconds = time.perf_counter() - started
        ranks = exchange(mine, job.device)
        record = record_of(
            ranks, job.run, progress, tokens=int(tokens), grad_norm=grad_norm, lr=lr, step_seconds=step_seconds
        )
        if log:
            log.write(record)
        if not math.isfinite(record["loss"] + grad_norm):
            raise FloatingPointError(f"step {progress.step}: loss {record['loss']}, gradient norm {grad_norm}")
        stopping = any(rank.stopping for rank in ranks)
        if due(progress.step, every=t.checkpoint.every, last=stopping or progress.step == t.steps):
            save(checkpoints(job.run), job.model, job.optimizer, progress, t.shape)
            interface.restart()
    return progress.step >= t.steps


def step(
    model: nn.Module, optimizer: AdamW, batches: Sequence[Batch], tokens: Tensor, max_norm: float
) -> tuple[Tensor, Tensor]:
    """One optimizer step: this rank's share of the mean loss, and the gradient norm before clipping. No host reads.

    tokens  valid tokens of the step over all ranks and micro-steps, a scalar
    """
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for micro, (inputs, targets) in enumerate(batches):
        with boundary(model, last=micro == len(batches) - 1):
            loss = summed_loss(model, inputs, targets) / tokens
            loss.backward()
        total += loss.detach()
    norm = clip(model, max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def next_batches(job: Job, progress: Progress) -> list[Batch]:
    t, place = job.run.train, job.place
    dealt = deal(
        progress.samples,
        rank=place.rank,
        world_size=place.world_size,
        micro_batch=job.run.micro_batch,
        accumulation=t.accumulation,
    )
    loaded = (load_batch(job.corpus, samples, sequence=t.sequence, seed=t.seed) for samples in dealt)
    return [(inputs.to(job.device), targets.to(job.device)) for inputs, targets in loaded]


def valid_tokens(batches: Sequence[Batch]) -> Tensor:
    """Valid targets of all ranks and micro-steps, a scalar on the device. Collective over all ranks."""
    count = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum()
    dist.all_reduce(count)
    return count


def due(step: int, *, every: int, last: bool) -> bool:
    """Whether a checkpoint is due after `step`: every so many steps and at the end; 0 = never. Pure."""
    return every > 0 and (last or step % every == 0)


def checkpoints(run: RunConfig) -> Path:
    return Path(on_this_node(run.checkpoint_folder, os.environ))
