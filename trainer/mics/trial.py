"""Does the hierarchy pay on this network? Both forms of the collectives, timed side by side before a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mics.sharding import Connection, collectives_of, connect, disconnect
from mics.topology import RankGrid

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
    forms = [_passes(connection, block_bytes, device) for connection in connections]
    for form in forms:
        form()
    measured: list[list[float]] = []
    out_of_time = False
    while not out_of_time and len(measured) < REPEATS:
        order = forms if len(measured) % 2 else forms[::-1]  # what slows one form down by its place slows both
        taken = {form: _seconds_of(form, device) for form in order}
        row = torch.tensor([*(taken[form] for form in forms), time.perf_counter() - started], dtype=torch.float64)
        row = row.to(device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        *both, elapsed = row.tolist()
        measured.append(both)
        out_of_time = elapsed >= seconds
    for connection in connections:
        disconnect(connection)
    flat, hierarchical = (statistics.median(column) for column in zip(*measured, strict=True))
    return Trial(flat, hierarchical, len(measured))


def _passes(connection: Connection, block_bytes: float, device: torch.device) -> Callable[[], None]:
    """One gather and one reduce-scatter of `block_bytes`, as FSDP2 calls them."""
    gather, reduce_scatter = collectives_of(connection)
    shard = connection.shard
    mine = -(-int(block_bytes) // (4 * shard.size()))  # fp32 elements
    whole = torch.zeros(mine * shard.size(), device=device)
    part = torch.zeros(mine, device=device)

    def passes() -> None:
        work = gather(whole, whole.narrow(0, shard.rank() * mine, mine), shard)
        if work is not None:
            work.wait()
        reduce_scatter(part, whole, shard, dist.ReduceOp.SUM)

    return passes


def _seconds_of(form: Callable[[], None], device: torch.device) -> float:
    dist.barrier()
    _finish(device)
    started = time.perf_counter()
    form()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
