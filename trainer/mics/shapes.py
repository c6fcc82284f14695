"""Model shapes, their exact parameter counts and their FLOPs. Pure, standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["gpt", "bert", "llama"]
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class ModelShape:
    """A pre-norm transformer of one of three families. `hidden` is also heads x head size.

    gpt    decoder of GPT-2: learned positions, LayerNorm, GELU (tanh form), biases
    bert   the same as an encoder that guesses hidden tokens: exact GELU; the head is dense, GELU, LayerNorm and the
           token embedding, with a bias
    llama  decoder of today: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases
    """

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  (read by pydantic, never changed)

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 256
    ffn: int = 0  # 0 means 4 * hidden
    positions: int = 1024  # the longest sequence
    family: Family = "gpt"
    kv_heads: int = 0  # llama: heads of keys and values; 0 means as many as heads
    tied: bool = True  # the head multiplies by the token embedding
    rope_theta: float = ROPE_THETA  # llama: base of the rotary angles
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "vocabulary", "positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field, meaning in (("ffn", "4 * hidden"), ("kv_heads", "heads")):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be positive (or 0 for {meaning}), got {getattr(self, field)}")
        for field in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be positive and finite, got {getattr(self, field)}")
        if self.family not in get_args(Family):
            raise ValueError(f"unknown family {self.family!r}; known: {', '.join(get_args(Family))}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.family == "llama":
            self._check_llama()
        elif self.kv_heads not in (0, self.heads) or self.rope_theta != ROPE_THETA:
            raise ValueError(f"kv_heads and rope_theta belong to family llama, not to {self.family}")

    def _check_llama(self) -> None:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"hidden / heads is {self.head_size}; rotary positions need an even number")

    @property
    def masked(self) -> bool:
        """An encoder that guesses hidden tokens; else each token's target is the next one."""
        return self.family == "bert"

    @property
    def gated(self) -> bool:
        """The feed-forward layer has a gate, a third matrix of hidden x ffn_hidden (SwiGLU)."""
        return self.family == "llama"

    @property
    def biased(self) -> bool:
        """Linear layers and norms have biases."""
        return self.family != "llama"

    @property
    def learned_positions(self) -> bool:
        return self.family != "llama"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def ffn_hidden(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def kv_hidden(self) -> int:
        """Width of the keys, and of the values: `hidden` without grouped-query attention."""
        return (self.kv_heads or self.heads) * self.head_size

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block: two norms, QKV, projection and the feed-forward matrices."""
        h, f, kv = self.hidden, self.ffn_hidden, self.kv_hidden
        biases = (h + 2 * kv) + h + f + h + 2 * h if self.biased else 0  # the last two are those of the norms
        return self._block_multiplied + 2 * h + biases

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embeddings, final norm, the head where it is not the token embedding."""
        h, v = self.hidden, self.vocabulary
        norm = 2 * h if self.biased else h
        embeddings = v * h + (self.positions * h if self.learned_positions else 0)
        guess = h * h + h + norm + v if self.masked else 0
        return embeddings + norm + guess + (0 if self.tied else v * h)

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of the forward pass for one token of a sequence of this length; the backward pass has twice as many.

        A multiply-add is two. Matrices alone are counted, the head included, and both products of the attention over
        the whole sequence, also where half of it is masked: PaLM, arXiv 2204.02311, appendix B; the same as Narayanan
        et al., arXiv 2104.04473, equation 3 without recomputation.
        """
        head = self.hidden * self.vocabulary + (self.hidden**2 if self.masked else 0)
        attention = 2 * self.layers * self.hidden * sequence
        return 2.0 * (self.layers * self._block_multiplied + head + attention)

    @property
    def _block_multiplied(self) -> int:
        """Elements of a block's matrices: each token is multiplied once by each."""
        h = self.hidden
        return 2 * h * h + 2 * h * self.kv_hidden + (3 if self.gated else 2) * h * self.ffn_hidden


def _bert(hidden: int, layers: int, heads: int, vocabulary: int = 32008) -> ModelShape:
    return ModelShape(hidden, layers, heads, vocabulary, positions=512, family="bert")


def _llama(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        hidden, layers, heads, 128256, ffn, 8192, family="llama", kv_heads=8, tied=tied, rope_theta=500000.0
    )


PRESETS: dict[str, ModelShape] = {
    "gpt-3m": ModelShape(hidden=256, layers=4, heads=4, positions=256),
    "gpt-17m": ModelShape(hidden=512, layers=5, heads=8, positions=512),
    "gpt2-124m": ModelShape(hidden=768, layers=12, heads=12, vocabulary=50257),
    "gpt2-1.5b": ModelShape(hidden=1600, layers=48, heads=25, vocabulary=50257),
    # The models of the MiCS paper. Of 10b and 15b the authors' own configuration is known (vocabulary 32003, padded).
    "bert-10b": _bert(2560, 127, 40),
    "bert-15b": _bert(2560, 190, 40),
    # Unverified, as the paper was remembered. Published for 50b are 40 heads, which do not divide 8192.
    "bert-20b": _bert(5120, 64, 40),
    "bert-50b": _bert(8192, 62, 64),
    "roberta-20b": _bert(5120, 62, 40, vocabulary=50265),
    "gpt2-20b": ModelShape(hidden=5120, layers=62, heads=40, vocabulary=50265),
    # Published by their size alone; these shapes are ours.
    "bert-1.5b": _bert(1600, 48, 25),
    "gpt-100b": ModelShape(hidden=9216, layers=98, heads=72, vocabulary=50257, positions=2048),
    # Llama 3 (arXiv 2407.21783, table 3). Llama 3.2 1B, which this follows, stretches its rotary angles besides.
    "llama-1b-like": _llama(2048, 16, 32, 8192, tied=True),
    "llama-8b": _llama(4096, 32, 32, 14336),
    "llama-70b": _llama(8192, 80, 64, 28672),
}


def shape_of(model: str | ModelShape) -> ModelShape:
    """The shape behind a preset's name, or the shape itself. Raises ValueError that lists the presets."""
    if isinstance(model, ModelShape):
        return model
    if model not in PRESETS:
        raise ValueError(f"unknown model {model!r}; presets: {', '.join(PRESETS)}; or give hidden, layers, heads")
    return PRESETS[model]
