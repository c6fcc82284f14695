"""What the planner's time model says of real machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mics.shapes import shape_of

from micsctl.bench.model import Point
from micsctl.planner.machines import KNOWN
from micsctl.planner.pays import points
from micsctl.planner.speeds import speeds_of
from micsctl.planner.time import Batch, compute_per_hop2

MODEL = "bert-10b"  # of the MiCS paper
_TYPE = "p3dn.24xlarge"
_NODES, _MICRO_BATCH = 8, 8


def compute_per_hop2_of(sizes: Iterable[int]) -> dict[int, float]:
    """Compute : hop 2 of bert-10b at p = k on so many p3dn, by the number of nodes; one node has no hop 2.

    Weak scaling: each device has the share of the paper's 8192 sequences that it has on the most nodes.
    """
    found, devices = sorted(sizes), KNOWN[_TYPE].devices
    return {
        nodes: compute_per_hop2(
            shape_of(MODEL),
            speeds_of(_TYPE),
            nodes,
            devices,
            partition_size=devices,
            batch=Batch(global_batch=Batch().global_batch * nodes // found[-1]),
        )
        for nodes in found
        if nodes > 1
    }


def crossover() -> tuple[Point, ...]:
    """The predicted speed-up of mics over zero3, on 8 nodes of each type, at micro-batch 8, for models that fit into
    less than all of their devices."""
    found = points(nodes=(_NODES,), micro_batches=(_MICRO_BATCH,))
    return tuple(
        Point(point.compute_per_traffic, point.speedup, f"{point.type_name.split('.')[0]}, {point.model}")
        for point in found
        if point.partition_size < _NODES * KNOWN[point.type_name].devices  # else mics is zero3
    )
