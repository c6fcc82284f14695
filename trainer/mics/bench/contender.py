"""What every way to train has in common: it makes optimizer steps on the batches that all of them see."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mics.bench.emulated import Device, emulate
from mics.config import RunConfig
from mics.data.batches import Batch
from mics.models.build import build
from mics.models.built import IGNORED, Built
from mics.precision import DTYPES
from mics.ranks import Place, together
from mics.recompute import check_compiler, prepare_blocks


@dataclass(frozen=True)
class Setting:
    """What does not differ between the contenders: the run, this rank's place and device, the emulated computation."""

    run: RunConfig
    place: Place
    device: torch.device
    emulated_compute_seconds: float = 0.0
    emulated: Device = field(default_factory=Device)

    def build(self) -> Built:
        """A model without memory, its blocks ready to be sharded. Collective: where one rank refuses, all do."""
        train = self.run.train
        built = together(self._checked, self.place)
        assert train.checkpointing != "auto"
        prepare_blocks(built.blocks, checkpointing=train.checkpointing, compile=train.compile)
        if self.emulated_compute_seconds:
            emulate(built.blocks, self.emulated_compute_seconds, self.emulated)
        return built

    def _checked(self) -> Built:
        check_compiler(self.run.train.compile, os.environ)
        return build(self.run.train, DTYPES[self.run.precision].master)


class Contender(ABC):
    """One way to train, ready on this rank. Gathered weights are freed after the forward pass, except in zero2 and
    where DeepSpeed keeps them at its defaults."""

    built: Built
    # seconds that the computation has stood still for collectives, since the last call; None = nobody measures them
    waited: Callable[[], float] | None = None

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over the micro-steps of this rank; returns its share of the mean loss, in nats per token.
        Collective over all ranks."""
        tokens = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum()
        dist.all_reduce(tokens)
        shares = [
            self.micro_step(inputs, targets, tokens, last=micro == len(batches) - 1)
            for micro, (inputs, targets) in enumerate(batches)
        ]
        self.update()
        return torch.stack(shares).sum(dtype=torch.float64)

    @abstractmethod
    def micro_step(self, inputs: Tensor, targets: Tensor, tokens: Tensor, *, last: bool) -> Tensor:
        """Forward and backward pass of the summed loss over `tokens`, those of all ranks and micro-steps; returns it,
        detached."""

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients, change the weights, forget the gradients."""

    def counted_bytes(self) -> int | None:
        """Bytes that this rank has sent to other nodes since the last call, by its own count; None = nobody counts."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give back what outlives the object: process groups, hooks. Collective over all ranks."""
