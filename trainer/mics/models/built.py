"""What the trainer needs to know of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from mics.init import Fill

IGNORED = -100  # a target that does not count: padding, or a token that a masked model need not guess


@dataclass(frozen=True)
class Built:
    """A model without memory (on the meta device), and how to train it.

    blocks           modules of the model that are gathered one at a time; together at most once each
    fill             writes the initial value of one parameter (`mics.init`)
    summed_loss      (model, inputs [batch, sequence], targets [batch, sequence]) to the cross entropy in nats, summed
                     over the targets that are not IGNORED; fp32 or wider. It calls the model (not one of its parts),
                     so that FSDP2's hooks run
    vocabulary       token ids lie in [0, vocabulary)
    masked           an encoder that guesses hidden tokens; else each token's target is the next one
    identity         what a checkpoint must agree on, by name
    flops_per_token  of the forward pass, without the attention scores' share where that is not known
    """

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    fill: Fill
    summed_loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    vocabulary: int
    masked: bool
    identity: Mapping[str, object]
    flops_per_token: float

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of all blocks together."""
        return sum(p.numel() for block in self.blocks for p in block.parameters())

    @cached_property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: they stay gathered from forward to backward."""
        return sum(p.numel() for p in self.model.parameters()) - self.block_parameters
