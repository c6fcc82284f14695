"""The `train:` section of mics.yaml, and run.json, which is that section with every `auto` resolved.

Frozen standard-library dataclasses: the trainer has no other dependency than torch. `micsctl.spec` validates these same
classes through pydantic, so nothing is defined twice. Pure.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from mics.shapes import ModelShape, shape_of
from mics.strategies import StrategyName, rank_grid
from mics.topology import RankGrid

T = TypeVar("T")
Auto = Literal["auto"]
Precision = Literal["fp32", "bf16", "fp64"]

_STRICT = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go (a folder that every node sees) and how often (in optimizer steps; 0 = never)."""

    __pydantic_config__ = _STRICT

    path: str = "/fsx/checkpoints"
    every: int = 10

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be 0 or more, got {self.every}")
        if not self.path.startswith("/"):
            raise ValueError(f"checkpoint.path must be absolute, got {self.path!r}")


@dataclass(frozen=True)
class TrainConfig:
    """What to train and how. Sizes are per device unless they say otherwise."""

    __pydantic_config__ = _STRICT

    model: str | ModelShape = "gpt-3m"
    data: tuple[str, ...] = ("stdlib",)  # "stdlib", or files and folders on the nodes
    strategy: StrategyName = "mics"
    partition: int | Auto = "auto"
    hierarchical: bool | Auto = "auto"
    micro_batch: int | Auto = "auto"  # sequences per device and micro-step
    accumulation: int = 4  # micro-steps per optimizer step
    sequence: int = 128  # tokens per sequence
    steps: int = 20  # optimizer steps
    lr: float = 2e-3
    warmup: int = 2  # optimizer steps of linear warm-up, then a cosine down to lr / 10
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm
    precision: Precision | Auto = "auto"
    seed: int = 0
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        for name in ("accumulation", "sequence", "steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("partition", "micro_batch"):
            if getattr(self, name) != "auto":
                _at_least(name, getattr(self, name), 1)
        _at_least("warmup", self.warmup, 0)
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more and finite, got {self.weight_decay}")
        if not all(self.data) or not self.data:
            raise ValueError("data names no corpus; use [stdlib] or files on the nodes")
        shape = shape_of(self.model)
        if self.sequence > shape.positions:
            raise ValueError(f"sequence {self.sequence} is longer than the model's {shape.positions} positions")

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class RunConfig:
    """run.json: everything the trainer needs to know. No `auto` is left in `train`."""

    run_id: str
    train: TrainConfig
    nodes: int
    devices_per_node: int
    node_order: tuple[int, ...] = ()  # cluster index of the node with ranks 0..k-1, of the next, ...; () = as they are
    interface: str | None = None  # network interface whose counters give the traffic; None = count in the communicators
    resume_from: str | None = None  # folder of one whole checkpoint

    def __post_init__(self) -> None:
        for name in ("partition", "hierarchical", "micro_batch", "precision"):
            if getattr(self.train, name) == "auto":
                raise ValueError(f"train.{name} is still auto; run.json holds resolved values only")

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def micro_batch(self) -> int:
        """Sequences per device and micro-step."""
        assert self.train.micro_batch != "auto"
        return self.train.micro_batch

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, over all devices."""
        return self.world_size * self.micro_batch * self.train.accumulation

    @property
    def precision(self) -> Precision:
        assert self.train.precision != "auto"
        return self.train.precision

    @property
    def grid(self) -> RankGrid:
        t = self.train
        return rank_grid(
            t.strategy,
            world_size=self.world_size,
            devices_per_node=self.devices_per_node,
            partition=t.partition,
            hierarchical=t.hierarchical,
        )

    def node_of(self, rank: int) -> int:
        """Cluster index of the node that has this rank."""
        place = rank // self.devices_per_node
        return self.node_order[place] if self.node_order else place

    @property
    def checkpoint_folder(self) -> str:
        """Checkpoints of this run: one folder per step below it."""
        return f"{self.train.checkpoint.path.rstrip('/')}/{self.run_id}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Parse run.json. Raises ValueError that names the unknown or missing key."""
        raw = _object(json.loads(text), "run.json")
        train = dict(_object(raw.get("train", {}), "train"))
        if isinstance(train.get("model"), dict):
            train["model"] = _build(ModelShape, train["model"], "train.model")
        train["checkpoint"] = _build(CheckpointConfig, train.get("checkpoint", {}), "train.checkpoint")
        if isinstance(train.get("data"), list):
            train["data"] = tuple(train["data"])
        raw["node_order"] = tuple(raw.get("node_order", ()))
        return _build(cls, {**raw, "train": _build(TrainConfig, train, "train")}, "run.json")

    @classmethod
    def read(cls, path: str | Path) -> RunConfig:
        return cls.from_json(Path(path).read_text())


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one object, not {value!r}")
    return value


def _build(cls: type[T], values: Any, where: str) -> T:
    values = _object(values, where)
    unknown = sorted(set(values) - {f.name for f in fields(cls)})  # type: ignore[arg-type]  # every cls is a dataclass
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
