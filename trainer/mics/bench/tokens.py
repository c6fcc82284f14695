"""Batches that need no data: every contender sees the same global batch, however it shares the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mics.data.batches import Batch
from mics.data.order import deal
from mics.init import key_of


def random_batches(
    step: int,
    *,
    rank: int,
    world_size: int,
    micro_batch: int,
    micro_steps: int,
    sequence: int,
    vocabulary: int,
    seed: int,
) -> Sequence[Batch]:
    """The micro-steps of one rank, inputs and targets int64 [micro_batch, sequence], on the CPU. Pure.

    Tokens are drawn from (seed, step), the low ids more often than the high ones: so there is something to learn, and
    contenders whose gradients differ have losses that differ.
    """
    generator = torch.Generator().manual_seed(key_of(seed, f"step {step}"))
    size = world_size * micro_batch * micro_steps, sequence + 1
    text = (torch.rand(size, generator=generator) ** 3 * vocabulary).long()
    dealt = deal(0, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=micro_steps)
    rows = [text[samples.start : samples.stop] for samples in dealt]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
