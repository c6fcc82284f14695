"""A GPT-2 style decoder, exactly `mics.shapes.ModelShape`: learned positions, pre-LN, GELU, biases, no dropout.

The head multiplies by the token embedding's own weight, so that weight belongs to the root module, not to a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mics.shapes import ModelShape

IGNORED = -100  # a target that does not count: padding


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return projected


class FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden)
        self.out = nn.Linear(shape.ffn_hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.out(F.gelu(self.up(x)))
        return projected


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm_feed_forward = nn.LayerNorm(shape.hidden)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        after: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return after


class GPT(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, vocabulary]. `blocks` are the units to shard."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def fill(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Write the initial value of the parameter `name` into `full` (its whole, unsharded shape).

        Normal. Embeddings as in GPT-2's code: spread 0.02 for tokens, 0.01 for positions. A linear layer: 1 / sqrt(fan
        in), divided by sqrt(2 layers) where it writes into the residual stream (GPT-2 paper, section 2.3), so that the
        first steps go well at any width. Norms 1, biases 0.
        """
        if name.endswith(".bias"):
            full.zero_()
        elif full.dim() == 1:
            full.fill_(1.0)
        else:
            full.normal_(0.0, self._spread(name, fan_in=full.shape[1]), generator=generator)

    def _spread(self, name: str, fan_in: int) -> float:
        embedding = {"tokens.weight": 0.02, "positions.weight": 0.01}.get(name)
        residual = math.sqrt(2 * self.shape.layers) if name.endswith(".out.weight") else 1.0
        return embedding or 1 / math.sqrt(fan_in) / residual


def build_on_meta(shape: ModelShape, dtype: torch.dtype) -> GPT:
    """The model without memory. Raises AssertionError where its size is not what `mics.shapes` promises the planner."""
    with torch.device("meta"):
        model = GPT(shape).to(dtype)
    built = sum(p.numel() for p in model.parameters())
    if built != shape.parameters:
        raise AssertionError(f"the model has {built} parameters, its shape says {shape.parameters}")
    return model


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed (not averaged) over the valid targets of [batch, sequence]; -100 is not valid.

    The sum is taken in fp32 when the logits are 16 bit wide.
    """
    logits = model(inputs).flatten(0, 1)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
