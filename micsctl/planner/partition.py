"""The smallest partition size that fits, and the micro-batch and checkpointing that go with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mics.config import Checkpointing
from mics.topology import partition_sizes

from micsctl.planner.model import Candidate, Machines, Memory

MARGIN = 0.9  # share of the device's memory that is planned with: predictions are some percent off (memory.py)
MICRO_BATCHES = (8, 4, 2, 1)  # what `auto` tries; 8 is what the runs of the MiCS paper use (Zhang et al., VLDB 2022)

MemoryOf = Callable[[int, int, Checkpointing], Memory]  # (partition size, micro-batch, checkpointing)


@dataclass(frozen=True)
class Choice:
    partition_size: int
    micro_batch: int
    checkpointing: Checkpointing


@dataclass(frozen=True)
class Tries:
    """What may be chosen of, in order of preference."""

    micro_batches: Sequence[int]
    checkpointings: Sequence[Checkpointing]  # each needs less memory than the one before


def memory_limit_bytes(machines: Machines) -> float:
    """What a plan may fill on one device."""
    return MARGIN * machines.device_memory_bytes


def choose(machines: Machines, tries: Tries, memory_of: MemoryOf) -> Choice | None:
    """The first checkpointing and micro-batch (in this order) for which some p fits, and the smallest such p.

    Partition groups inside one node are tried first, with everything: their gathers send nothing between nodes, and
    computing activations again costs a third more arithmetic at most. Only when none fits may p span nodes, with what
    needs the least memory first. The micro-batch comes before p: doubling it halves the bytes that gathers send per
    token, while no p > k sends as much as twice what another does ((p - k)/p of the weights in two stages).

    None where nothing fits, even with the smallest micro-batch at p = n.
    """
    sizes = partition_sizes(machines.world_size, machines.devices_per_node)
    in_node = tuple(p for p in sizes if p <= machines.devices_per_node)
    reaches = [(in_node, c) for c in tries.checkpointings] + [(sizes, c) for c in reversed(tries.checkpointings)]
    for reach, checkpointing in reaches:
        for micro_batch in tries.micro_batches:
            for p in reach:
                if fits(machines, memory_of(p, micro_batch, checkpointing)):
                    return Choice(p, micro_batch, checkpointing)
    return None


def choose_at(machines: Machines, p: int, tries: Tries, memory_of: MemoryOf) -> Choice | None:
    """The first checkpointing and micro-batch (in this order) that fit at this p; None where none do."""
    for checkpointing in tries.checkpointings:
        for micro_batch in tries.micro_batches:
            if fits(machines, memory_of(p, micro_batch, checkpointing)):
                return Choice(p, micro_batch, checkpointing)
    return None


def fits(machines: Machines, memory: Memory) -> bool:
    return memory.total <= memory_limit_bytes(machines)


def candidates(machines: Machines, choice: Choice, memory_of: MemoryOf) -> tuple[Candidate, ...]:
    """Every p that divides n and fits in or fills nodes, ascending, weighed with the rest of the choice."""
    sizes = partition_sizes(machines.world_size, machines.devices_per_node)
    weighed = ((p, memory_of(p, choice.micro_batch, choice.checkpointing)) for p in sizes)
    return tuple(Candidate(p, memory, fits(machines, memory)) for p, memory in weighed)
