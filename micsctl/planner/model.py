"""The plan: the resolved answer to "what will happen"."""

from __future__ import annotations

from dataclasses import dataclass

from mics.config import TrainConfig


@dataclass(frozen=True)
class Machines:
    """The facts about the machines that a plan rests on."""

    nodes: int
    devices_per_node: int
    device_memory_bytes: int
    device: str  # "A100", "cpu"
    bf16: bool

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one device at the peak, by what they hold (planner/memory.py)."""

    states: float
    working_set: float
    activations: float
    loss: float
    overhead: float

    @property
    def total(self) -> float:
        return self.states + self.working_set + self.activations + self.loss + self.overhead


@dataclass(frozen=True)
class Candidate:
    """One partition size that was weighed."""

    partition_size: int
    memory: Memory
    fits: bool


@dataclass(frozen=True)
class Plan:
    """Every `auto` of the train section answered, with the reason in words."""

    machines: Machines
    train: TrainConfig  # no `auto` left in it
    parameters: int | None  # None: a model of the user's own, which only the nodes can build
    partition_size: int
    hierarchical: bool
    memory_limit_bytes: float  # what is planned with: the device's memory times the margin
    candidates: tuple[Candidate, ...]  # ascending partition sizes; () where the model cannot be weighed
    traffic_bytes: float | None  # sent per node and optimizer step
    traffic_zero3_bytes: float | None  # the same for strategy zero3
    reason: str
