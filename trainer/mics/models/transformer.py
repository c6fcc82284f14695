"""The transformer of `mics.shapes.ModelShape`: decoders of GPT-2 and of today, and the encoder. No dropout.

A tied head multiplies by the token embedding's own weight, so that weight belongs to the root module, not to a block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mics.models.built import IGNORED
from mics.shapes import ModelShape

_SPREADS = {"tokens.weight": 0.02, "positions.weight": 0.01, "head.weight": 0.02}  # as in GPT-2's code


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the targets that are not IGNORED; in fp32 where the logits are 16 bit wide.

    logits [..., vocabulary], targets [...]
    """
    logits = logits.flatten(0, -2)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) on x [..., sequence, head size], whose halves are the pairs' parts.

    Angles are made here and not kept: a buffer would not survive the meta device, and as an argument of a block FSDP2
    would cast them to 16 bit.
    """
    sequence, size = x.shape[-2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(0, size, 2, device=x.device, dtype=wide) / size
    angles = torch.outer(torch.arange(sequence, device=x.device, dtype=wide), theta**-steps)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _norm(shape: ModelShape) -> nn.Module:
    if shape.biased:
        return nn.LayerNorm(shape.hidden, shape.norm_eps)
    return nn.RMSNorm(shape.hidden, shape.norm_eps)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.hidden, shape.hidden + 2 * shape.kv_hidden, bias=shape.biased)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=shape.biased)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        widths = (shape.hidden, shape.kv_hidden, shape.kv_hidden)
        q, k, v = (part.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for part in self.qkv(x).split(widths, -1))
        if not shape.learned_positions:
            q, k = rotate(q, shape.rope_theta), rotate(k, shape.rope_theta)
        grouped = shape.kv_hidden != shape.hidden
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not shape.masked, enable_gqa=grouped)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=shape.biased)
        self.out = nn.Linear(shape.ffn_hidden, shape.hidden, bias=shape.biased)
        self.gelu = "none" if shape.masked else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.gate(x)) * self.up(x) if self.gate else F.gelu(self.up(x), approximate=self.gelu)
        projected: Tensor = self.out(wide)
        return projected


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm_attention = _norm(shape)
        self.attention = Attention(shape)
        self.norm_feed_forward = _norm(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        after: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return after


class Head(nn.Module):
    """Hidden states to logits; `embedding` is the matrix of a tied head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden, shape.hidden) if shape.masked else None
        self.norm = _norm(shape) if shape.masked else None
        self.weight = None if shape.tied else nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.bias = nn.Parameter(torch.empty(shape.vocabulary)) if shape.masked else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.dense and self.norm:
            x = self.norm(F.gelu(self.dense(x)))
        return F.linear(x, embedding if self.weight is None else self.weight, self.bias)


class Transformer(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, vocabulary]. `blocks` are the units to shard."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden) if shape.learned_positions else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = Head(shape)

    def forward(self, ids: Tensor, targets: Tensor | None = None, loss_chunk: int = 0) -> Tensor:
        """The logits; with targets [batch, sequence] instead the summed cross entropy in nats.

        loss_chunk  tokens whose logits exist at one time, made again in the backward pass; 0 = all. Each chunk adds
                    its share to the head's gradient in the dtype of the computation, so a small one in 16 bit is noisy

        The loss is taken here, not outside: chunks need the head's weight, which FSDP2 gathers for the root's forward.
        """
        x = self.tokens(ids)
        if self.positions:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self._logits(x)
        if not 0 < loss_chunk < targets.numel():
            return self._loss(x, targets)
        chunks = zip(*(torch.split(whole.flatten(0, 1), loss_chunk) for whole in (x, targets)), strict=True)
        return torch.stack([checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x, self.tokens.weight)
        return logits

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(self._logits(x), targets)

    def fill(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Write the initial value of the parameter `name` into `full` (its whole, unsharded shape).

        Normal. As in GPT-2's code: spread 0.02 for tokens and for a head of its own, 0.01 for positions. A linear
        layer: 1 / sqrt(fan in), divided by sqrt(2 layers) where it writes into the residual stream (GPT-2 paper,
        section 2.3), so that the first steps go well at any width. Norms 1, biases 0.
        """
        if name.endswith(".bias"):
            full.zero_()
        elif full.dim() == 1:
            full.fill_(1.0)
        else:
            full.normal_(0.0, self._spread(name, fan_in=full.shape[1]), generator=generator)

    def _spread(self, name: str, fan_in: int) -> float:
        residual = math.sqrt(2 * self.shape.layers) if name.endswith(".out.weight") else 1.0
        return _SPREADS.get(name) or 1 / math.sqrt(fan_in) / residual


def build_transformer(shape: ModelShape, dtype: torch.dtype) -> Transformer:
    """The model without memory. Raises AssertionError where its size is not what `mics.shapes` promises the planner."""
    with torch.device("meta"):
        model = Transformer(shape).to(dtype)
    built = sum(p.numel() for p in model.parameters())
    if built != shape.parameters:
        raise AssertionError(f"the model has {built} parameters, its shape says {shape.parameters}")
    return model


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Cross entropy in nats, summed over the targets [batch, sequence] that are not IGNORED; fp32 or wider."""
    loss: Tensor = model(inputs, targets=targets, **options)
    return loss
