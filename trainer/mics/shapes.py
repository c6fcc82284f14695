"""Model shapes and their exact parameter counts. Pure, standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A GPT-2 style decoder: learned positions, pre-LN, GELU, biases, head tied to the token embedding."""

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  (read by pydantic, never changed)

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 256
    ffn: int = 0  # 0 means 4 * hidden
    positions: int = 1024

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "heads", "vocabulary", "positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.ffn < 0:
            raise ValueError(f"ffn must be positive (or 0 for 4 * hidden), got {self.ffn}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")

    @property
    def ffn_hidden(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block: two norms, QKV, projection, two feed-forward layers, all with biases."""
        h, f = self.hidden, self.ffn_hidden
        return (4 * h) + (3 * h * h + 3 * h) + (h * h + h) + (h * f + f) + (f * h + h)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: token and position embedding, final norm. The head is the token embedding."""
        return self.vocabulary * self.hidden + self.positions * self.hidden + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters


PRESETS: dict[str, ModelShape] = {
    "gpt-3m": ModelShape(hidden=256, layers=4, heads=4, positions=256),
    "gpt-17m": ModelShape(hidden=512, layers=5, heads=8, positions=512),
    "gpt2-124m": ModelShape(hidden=768, layers=12, heads=12, vocabulary=50257),
    "gpt2-1.5b": ModelShape(hidden=1600, layers=48, heads=25, vocabulary=50257),
    "gpt2-20b": ModelShape(hidden=5120, layers=62, heads=40, vocabulary=50265),
}


def shape_of(model: str | ModelShape) -> ModelShape:
    """The shape behind a preset's name, or the shape itself. Raises ValueError that lists the presets."""
    if isinstance(model, ModelShape):
        return model
    if model not in PRESETS:
        raise ValueError(f"unknown model {model!r}; presets: {', '.join(PRESETS)}; or give hidden, layers, heads")
    return PRESETS[model]
