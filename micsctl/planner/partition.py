"""The smallest partition size that fits, and the micro-batch that goes with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mics.topology import partition_sizes

from micsctl.planner.model import Candidate, Machines, Memory

MARGIN = 0.9  # share of the device's memory that is planned with: predictions are some percent off (memory.py)
MICRO_BATCHES = (8, 4, 2, 1)  # what `auto` tries; 8 is what the runs of the MiCS paper use (Zhang et al., VLDB 2022)

MemoryOf = Callable[[int, int], Memory]  # (partition size, micro-batch)


@dataclass(frozen=True)
class Choice:
    partition_size: int
    micro_batch: int


def memory_limit_bytes(machines: Machines) -> float:
    """What a plan may fill on one device."""
    return MARGIN * machines.device_memory_bytes


def choose(machines: Machines, micro_batches: Sequence[int], memory_of: MemoryOf) -> Choice | None:
    """The first micro-batch (they are tried in order) for which some p fits, and the smallest such p.

    Partition groups inside one node are tried first, with every micro-batch: their gathers send nothing between nodes.
    Only when none fits may p span nodes. Then the micro-batch comes before p: doubling it halves the bytes that gathers
    send per token, while no p > k sends as much as twice what another does ((p - k)/p of the weights in two stages).

    None where nothing fits, even with the smallest micro-batch at p = n.
    """
    limit = memory_limit_bytes(machines)
    sizes = partition_sizes(machines.world_size, machines.devices_per_node)
    in_node = tuple(p for p in sizes if p <= machines.devices_per_node)
    for reach in (in_node, sizes):
        for micro_batch in micro_batches:
            for p in reach:
                if memory_of(p, micro_batch).total <= limit:
                    return Choice(p, micro_batch)
    return None


def largest_micro_batch(machines: Machines, micro_batches: Sequence[int], p: int, memory_of: MemoryOf) -> int | None:
    """The first micro-batch that fits at this p; None where none does."""
    limit = memory_limit_bytes(machines)
    return next((b for b in micro_batches if memory_of(p, b).total <= limit), None)


def candidates(machines: Machines, micro_batch: int, memory_of: MemoryOf) -> tuple[Candidate, ...]:
    """Every p that divides n and fits in or fills nodes, ascending, weighed at one micro-batch."""
    limit = memory_limit_bytes(machines)
    sizes = partition_sizes(machines.world_size, machines.devices_per_node)
    weighed = ((p, memory_of(p, micro_batch)) for p in sizes)
    return tuple(Candidate(p, memory, memory.total <= limit) for p, memory in weighed)
