"""The contenders in turns, each step measured on all ranks."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mics import settings
from mics.bench.contender import Contender, Setting
from mics.bench.deepspeed import DeepSpeed
from mics.bench.fsdp2 import Fsdp2
from mics.bench.ours import Ours
from mics.bench.tokens import random_batches
from mics.config import RunConfig
from mics.data.batches import Batch
from mics.entries import BenchConfig, Entry
from mics.metrics import InterfaceCounter
from mics.strategies import STRATEGIES
from mics.train import At, nowhere


@dataclass(frozen=True)
class Turn:
    """One optimizer step of one entry. `round` counts from 1, those that warm up included."""

    round: int
    entry: Entry


def schedule(config: BenchConfig) -> Iterator[Turn]:
    """Who trains when. Pure.

    Together: each round has one step of every entry. Every second round goes backwards and every two rounds begin one
    entry later, so that what slows the machine for a while falls on all alike and none always follows the same one.
    Otherwise all rounds of an entry, then those of the next.
    """
    rounds, entries = range(1, config.warmup_steps + config.steps + 1), config.entries
    if not config.together:
        yield from (Turn(number, entry) for entry in entries for number in rounds)
        return
    for number in rounds:
        first = (number - 1) // 2 % len(entries)
        order = (*entries[first:], *entries[:first])
        yield from (Turn(number, entry) for entry in (order if number % 2 else order[::-1]))


@dataclass(frozen=True)
class Measured:
    """One step, over all ranks.

    step_seconds   of the slowest rank
    loss           mean, in nats per token
    traffic_bytes  sent per node by the interface; None = no interface to read
    counted_bytes  sent per node by the contender's own count; None = it does not count
    """

    step_seconds: float
    loss: float
    traffic_bytes: float | None
    counted_bytes: float | None


def measure(contender: Contender, batches: Sequence[Batch], interface: InterfaceCounter, setting: Setting) -> Measured:
    """One optimizer step. Collective over all ranks."""
    run, device = setting.run, setting.device
    contender.counted_bytes()
    interface.restart()
    dist.barrier()
    began = time.perf_counter()
    setting.emulated.restart(contender.waited)
    loss = float(contender.step(batches))
    dist.barrier()  # every byte of this step has left its node
    seconds = time.perf_counter() - began
    sent, counted = interface.take(), contender.counted_bytes()
    sums = torch.tensor([loss, sent, counted or 0], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean_loss, sent_by_all, counted_by_all = sums.tolist()
    return Measured(
        float(slowest),
        mean_loss,
        sent_by_all / run.nodes if run.interface else None,
        None if counted is None else counted_by_all / run.nodes,
    )


def contender_of(entry: Entry, setting: Setting) -> Contender:
    """Collective over all ranks."""
    if entry.strategy in STRATEGIES:
        return Ours(entry, setting)
    return Fsdp2(entry, setting) if entry.strategy.startswith("fsdp2") else DeepSpeed(entry, setting)


def race(
    config: BenchConfig, setting: Setting, interface: InterfaceCounter, at: At = nowhere
) -> Iterator[dict[str, Any]]:
    """One line of metrics.jsonl for each turn, as it is made. Collective over all ranks.

    at  told whose turn it is
    """
    run, place, device = setting.run, setting.place, setting.device
    last_round = config.warmup_steps + config.steps
    contenders: dict[str, Contender] = {}
    settings.quiet_garbage()
    for step, turn in enumerate(schedule(config), start=1):
        entry = turn.entry
        if entry.name not in contenders:
            at(step, f"making {entry.name}", long=True)
            contenders[entry.name] = contender_of(entry, setting)
        contender = contenders[entry.name]
        batches = random_batches(
            turn.round,
            rank=place.rank,
            world_size=place.world_size,
            micro_batch=run.micro_batch,
            micro_steps=entry.micro_steps,
            sequence=run.train.sequence,
            vocabulary=contender.built.vocabulary,
            seed=run.train.seed,
        )
        at(step, entry.name)
        on_device = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
        yield record(step, turn, measure(contender, on_device, interface, setting), config, run)
        settings.collect(step)
        if turn.round == last_round and not config.together:
            contenders.pop(entry.name).close()
            del contender
            gc.collect()
    for contender in contenders.values():
        contender.close()


def record(step: int, turn: Turn, measured: Measured, config: BenchConfig, run: RunConfig) -> dict[str, Any]:
    """One line of metrics.jsonl; `samples` are the sequences of this step over all ranks. Pure."""
    samples = run.world_size * run.micro_batch * turn.entry.micro_steps
    return {
        "step": step,
        "round": turn.round,
        "warmup": turn.round <= config.warmup_steps,
        "entry": turn.entry.name,
        "step_seconds": measured.step_seconds,
        "loss": measured.loss if math.isfinite(measured.loss) else None,
        "traffic_bytes": measured.traffic_bytes,
        "counted_bytes": measured.counted_bytes,
        "samples": samples,
        "tokens_per_second": samples * run.train.sequence / measured.step_seconds,
    }
