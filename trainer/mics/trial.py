"""Does the hierarchy pay on this network? Both forms of the collectives, timed side by side before a run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch

from mics.sharding import Connection, connect, disconnect
from mics.topology import RankGrid
from mics.turns import Timed, gather_pass, in_turns, memory_for, reduce_scatter_pass

REPEATS = 50  # of each form at most; more do not move the median


@dataclass(frozen=True)
class Trial:
    """Seconds for one gather and one reduce-scatter of a block: of the slowest rank, median over the repeats.

    repeats  of each form
    """

    flat_seconds: float
    hierarchical_seconds: float
    repeats: int

    @property
    def pays(self) -> bool:
        return self.hierarchical_seconds < self.flat_seconds


def hierarchical_pays(
    grid_hierarchical: RankGrid, grid_flat: RankGrid, *, block_bytes: float, seconds: float, device: torch.device
) -> Trial:
    """Time both forms in turns. Collective over the world, and every rank gets the same answer.

    grid_flat    the same grid in its natural order: a flat ring on the hierarchical one crosses nodes at every hop
    block_bytes  of the gathered weights of one block
    seconds      longest time for it all; a first pass of each form, which connects the ranks, and one repeat are made
                 in any case

    The groups of both grids are given back at the end: call `connect` afterwards. Raises ValueError where the grids
    differ in more than the hierarchy.
    """
    if not grid_hierarchical.hierarchical or grid_flat != replace(grid_hierarchical, hierarchical=False):
        raise ValueError(f"a trial needs a grid with and without hierarchy, got {grid_hierarchical} and {grid_flat}")
    started = time.perf_counter()
    connections = [connect(grid, device=device.type) for grid in (grid_flat, grid_hierarchical)]
    memory = memory_for(block_bytes, grid_flat.world_size, device)
    forms = [_both(connection, block_bytes, memory) for connection in connections]
    for form in forms:
        form()
    measured = in_turns(forms, repeats=REPEATS, enough=lambda: time.perf_counter() - started >= seconds, device=device)
    for connection in connections:
        disconnect(connection)
    flat, hierarchical = (statistics.median(column) for column in zip(*measured, strict=True))
    return Trial(flat, hierarchical, len(measured))


def _both(connection: Connection, block_bytes: float, memory: torch.Tensor) -> Timed:
    """One gather and one reduce-scatter of a block."""
    gather = gather_pass(connection, block_bytes, memory)
    reduce_scatter = reduce_scatter_pass(connection, block_bytes, memory)

    def both() -> None:
        gather()
        reduce_scatter()

    return both
