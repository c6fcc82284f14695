"""The `train:` section of mics.yaml, and run.json, which is that section with every `auto` resolved.

Frozen standard-library dataclasses: the trainer has no other dependency than torch. `micsctl.spec` validates these same
classes through pydantic, so nothing is defined twice. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mics.shapes import ModelShape, shape_of
from mics.strategies import Reshard, StrategyName, rank_grid, reshard_of
from mics.topology import RankGrid

T = TypeVar("T")
Auto = Literal["auto"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Checkpointing = Literal["none", "selective", "full"]
Compile = Literal["none", "inductor", "aot_eager"]
Schedule = Literal["cosine", "wsd"]

_STRICT = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go, how often (in optimizer steps) and which of them stay."""

    __pydantic_config__ = _STRICT

    path: str = "/fsx/checkpoints"  # a folder that every node sees, or s3://bucket/prefix
    every: int = 10  # 0 = never
    keep: int = 3  # the newest ones; 0 = all
    keep_every: int = 0  # and for good those whose step is a multiple of this; 0 = none
    background: bool = True  # written while training goes on

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every"):
            _at_least(f"checkpoint.{name}", getattr(self, name), 0)
        if not self.path.startswith(("/", "s3://")) or self.path.rstrip("/") in ("", "s3:"):
            raise ValueError(f"checkpoint.path must be an absolute folder or s3://bucket/prefix, got {self.path!r}")


@dataclass(frozen=True)
class ValidationConfig:
    """A loss on text that is not trained on, every so many optimizer steps."""

    __pydantic_config__ = _STRICT

    every: int = 0  # 0 = never
    data: tuple[str, ...] = ()  # as in train.data; empty = `share` of train.data, taken from its end
    share: float = 0.05
    sequences: int = 64  # over all devices; the same ones each time

    def __post_init__(self) -> None:
        _at_least("validation.every", self.every, 0)
        _at_least("validation.sequences", self.sequences, 1)
        if not 0 < self.share < 1:
            raise ValueError(f"validation.share must lie between 0 and 1, got {self.share}")


@dataclass(frozen=True)
class LimitsConfig:
    """When a run that goes wrong is ended."""

    __pydantic_config__ = _STRICT

    skipped_steps: int = 20  # in a row, with a loss or gradient that is not finite
    first_step_seconds: float = 1800.0  # compilation, connections, the first read of the data
    step_seconds: float = 600.0  # afterwards

    def __post_init__(self) -> None:
        _at_least("limits.skipped_steps", self.skipped_steps, 1)
        for name in ("first_step_seconds", "step_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"limits.{name} must be positive and finite, got {getattr(self, name)}")


@dataclass(frozen=True)
class ProfileConfig:
    """A window of steps that is recorded in the run's folder."""

    __pydantic_config__ = _STRICT

    first_step: int = 0  # 0 = never
    steps: int = 2
    memory: bool = False  # a memory snapshot as well (GPU only)

    def __post_init__(self) -> None:
        _at_least("profile.first_step", self.first_step, 0)
        _at_least("profile.steps", self.steps, 1)


@dataclass(frozen=True)
class TrainConfig:
    """What to train and how. Sizes are per device unless they say otherwise."""

    __pydantic_config__ = _STRICT

    model: str | ModelShape = "gpt-3m"  # a preset, a shape, package.module:factory, or hf:CONFIG
    data: tuple[str, ...] = ("stdlib",)  # "stdlib", or files, folders and s3:// names that the nodes see
    initial: str = ""  # folder of safetensors with the first weights, seen by every node; empty = random ones
    mask_token: int | Auto = "auto"  # encoders only: id that hides a token; auto = the last of the vocabulary
    strategy: StrategyName = "mics"
    partition: int | Auto = "auto"
    hierarchical: bool | Auto = "auto"
    micro_batch: int | Auto = "auto"  # sequences per device and micro-step
    accumulation: int = 4  # micro-steps per optimizer step
    sequence: int = 128  # tokens per sequence
    steps: int = 20  # optimizer steps
    lr: float = 2e-3
    schedule: Schedule = "cosine"  # down to lr / 10; wsd = warm-up, stable, decay to lr / 10
    warmup: int = 2  # optimizer steps of linear warm-up
    decay: int = 0  # wsd: optimizer steps of linear decay at the end; 0 = a tenth of all
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm
    precision: Precision | Auto = "auto"
    checkpointing: Checkpointing | Auto = "auto"  # which activations are computed again in the backward pass
    reshard_after_forward: bool | int | Auto = "auto"  # free gathered weights; false = keep; k = keep one copy a node
    loss_chunk: int = 0  # tokens whose logits exist at one time; 0 = all
    compile: Compile = "none"  # torch.compile, block by block
    seed: int = 0
    deterministic: bool = False  # the same bits again on the same machines; slower
    tensorboard: bool = False
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        for name in ("accumulation", "sequence", "steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("partition", "micro_batch"):
            if getattr(self, name) != "auto":
                _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "decay", "loss_chunk"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more and finite, got {self.weight_decay}")
        if not all(self.data) or not self.data:
            raise ValueError("data names no corpus; use [stdlib] or files on the nodes")
        if self.shape and self.sequence > self.shape.positions:
            raise ValueError(f"sequence {self.sequence} is longer than the model's {self.shape.positions} positions")

    @property
    def shape(self) -> ModelShape | None:
        """None for a model of the user's own, which only the nodes can build."""
        return None if is_foreign(self.model) else shape_of(self.model)


def is_foreign(model: str | ModelShape) -> bool:
    """Whether the model is the user's own: package.module:factory, or hf:CONFIG."""
    return isinstance(model, str) and ":" in model


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
    node_names: tuple[str, ...] = ()  # instance id by cluster index; () = unknown
    trial_seconds: float = 0.0  # longest time to compare hierarchical with flat collectives at the start; 0 = do not
    interface: str | None = None  # network interface whose counters give the traffic; None = count in the communicators
    resume_from: str | None = None  # folder of one whole checkpoint

    def __post_init__(self) -> None:
        for name in ("partition", "hierarchical", "micro_batch", "precision", "checkpointing", "reshard_after_forward"):
            if getattr(self.train, name) == "auto":
                raise ValueError(f"train.{name} is still auto; run.json holds resolved values only")
        for name in ("nodes", "devices_per_node"):
            _at_least(name, getattr(self, name), 1)
        order = self.node_order or tuple(range(self.nodes if self.node_names else 0))
        if self.node_order and (len(set(order)) != self.nodes or len(order) != self.nodes or min(order) < 0):
            raise ValueError(f"node_order must name {self.nodes} different nodes, got {list(order)}")
        if self.node_names and max(order) >= len(self.node_names):
            raise ValueError(f"node_names has {len(self.node_names)} names and none for node {max(order)}")

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

    @property
    def reshard(self) -> Reshard:
        """How long gathered weights live."""
        assert self.train.reshard_after_forward != "auto"
        return reshard_of(self.train.strategy, self.train.reshard_after_forward, self.grid)

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
        for name, section in _SECTIONS.items():
            train[name] = _build(section, train.get(name, {}), f"train.{name}")
        raw["train"] = _build(TrainConfig, train, "train")
        return _build(cls, raw, "run.json")

    @classmethod
    def read(cls, path: str | Path) -> RunConfig:
        return cls.from_json(Path(path).read_text())


_SECTIONS: Mapping[str, type] = {
    "validation": ValidationConfig,
    "checkpoint": CheckpointConfig,
    "limits": LimitsConfig,
    "profile": ProfileConfig,
}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one object, not {value!r}")
    return value


def _build(cls: type[T], values: Any, where: str) -> T:
    values = _object(values, where)
    unknown = sorted(set(values) - {f.name for f in fields(cls)})  # type: ignore[arg-type]  # every cls is a dataclass
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    kinds = get_type_hints(cls)
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            raise ValueError(f"{where}: {name} must be {_in_words(kinds[name])}, got {value!r}")
    try:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of an annotated type. A bool is no number, a whole number may stand for any."""
    options = get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in options
    if options:
        return any(_fits(value, option) for option in options)
    return type(value) is kind or (kind is float and type(value) is int)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


def _in_words(kind: Any) -> str:
    options = get_args(kind)
    if get_origin(kind) is tuple:
        return f"a list, each item {_in_words(options[0])}"
    if get_origin(kind) is Literal:
        return " or ".join(options)
    return " or ".join(map(_in_words, options)) if options else _WORDS.get(kind, "an object")
