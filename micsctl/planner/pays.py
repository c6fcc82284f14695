"""Where MiCS pays and where it stops, predicted for real machines: strategies compared with equal work. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mics.config import Auto, Checkpointing, Precision
from mics.shapes import ModelShape, shape_of
from mics.strategies import free_partition, rank_grid, reshard_of
from mics.topology import RankGrid, partition_sizes
from mics.traffic import per_step

from micsctl.errors import UsageError
from micsctl.planner.machines import KNOWN
from micsctl.planner.memory import estimate
from micsctl.planner.model import Machines
from micsctl.planner.partition import fits
from micsctl.planner.speeds import speeds_of
from micsctl.planner.time import Batch, StepTime, predict

REDUCED_BYTES = 2  # as in the MiCS paper and in DeepSpeed. The trainer's fp32 costs zero3 more, and would favour mics
LOSS_CHUNK = 2048  # tokens whose logits exist at one time; else a vocabulary of 128,000 decides what fits
TYPES = ("p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge")
NODES = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8, 16)
# About 4 million tokens per optimizer step: the BERT runs of the MiCS paper, Llama 3 as it began (arXiv 2407.21783).
WORK: Mapping[str, Batch] = {
    "bert-10b": Batch(),
    "bert-15b": Batch(),
    "bert-50b": Batch(),
    "llama-8b": Batch(sequence=4096, global_batch=1024),
    "llama-70b": Batch(sequence=4096, global_batch=1024),
}


@dataclass(frozen=True)
class Choice:
    """The rank grid that is predicted to be fastest, and its time."""

    grid: RankGrid
    time: StepTime


@dataclass(frozen=True)
class Point:
    """One prediction: `mics` with its best p against `zero3`, the same batch on the same machines.

    compute_per_traffic  seconds of compute over the seconds that the bytes of zero3 need on the link at its full rate
    speedup              step seconds of zero3 over those of mics
    range_share          either step may be off by this share
    """

    type_name: str
    model: str
    nodes: int
    micro_batch: int
    partition_size: int
    hierarchical: bool
    compute_per_traffic: float
    speedup: float
    range_share: float


def fastest(
    shape: ModelShape,
    type_name: str,
    nodes: int,
    strategy: str,
    *,
    batch: Batch | None = None,
    partition: int | Auto = "auto",
    checkpointing: Checkpointing = "full",
) -> Choice | None:
    """The fastest way to have a strategy, in 16-bit precision (gradients too, while they are reduced), among those that
    fit into the memory; None where none does. `batch` None: that of the MiCS paper. `partition` auto: every p, and
    where a partition group of `mics` spans nodes, in two stages or flat.

    Raises UsageError for an instance type that is not known, for an unknown strategy, and for a p that the nodes or the
    strategy cannot have.
    """
    speeds, batch, precision = speeds_of(type_name), batch or Batch(), _precision(type_name)
    machines = _machines(type_name, nodes)
    choices = []
    for grid in _grids(strategy, machines, partition):
        reshard = reshard_of(strategy, True, grid)
        memory = estimate(
            shape,
            partition_size=grid.partition_size,
            micro_batch=batch.micro_batch,
            sequence=batch.sequence,
            precision=precision,
            device=machines.device,
            checkpointing=checkpointing,
            reshard=reshard,
            loss_chunk=LOSS_CHUNK,
        )
        if not fits(machines, memory):
            continue
        time = predict(
            shape,
            grid,
            speeds=speeds,
            micro_batch=batch.micro_batch,
            sequence=batch.sequence,
            micro_steps=batch.micro_steps(machines.world_size),
            precision=precision,
            checkpointing=checkpointing,
            reshard=reshard,
            reduced_bytes=REDUCED_BYTES,
        )
        choices.append(Choice(grid, time))
    return min(choices, key=lambda choice: choice.time.step_seconds, default=None)


def speedup(
    shape: ModelShape,
    type_name: str,
    nodes: int,
    strategy: str,
    over: str,
    *,
    batch: Batch | None = None,
    checkpointing: Checkpointing = "full",
) -> float:
    """How many times faster an optimizer step is with `strategy` than with the strategy `over`, each with its best p.

    Raises UsageError where one of them does not fit into the memory, and as `fastest` does.
    """
    times = []
    for name in (strategy, over):
        choice = fastest(shape, type_name, nodes, name, batch=batch, checkpointing=checkpointing)
        if choice is None:
            raise UsageError(
                f"cannot predict {strategy} against {over} on {nodes} x {type_name}",
                f"strategy {name} does not fit into the memory",
                next="name more nodes, a smaller model, or a smaller micro-batch",
            )
        times.append(choice.time.step_seconds)
    return times[1] / times[0]


def points(
    types: Sequence[str] = TYPES,
    work: Mapping[str, Batch] = WORK,
    nodes: Sequence[int] = NODES,
    micro_batches: Sequence[int] = MICRO_BATCHES,
) -> tuple[Point, ...]:
    """A point for each of these that fits into the memory, with full checkpointing."""
    found = (
        _point(name, model, count, replace(batch, micro_batch=micro_batch))
        for name in types
        for model, batch in work.items()
        for count in nodes
        for micro_batch in micro_batches
    )
    return tuple(point for point in found if point is not None)


def _point(type_name: str, model: str, nodes: int, batch: Batch) -> Point | None:
    shape = shape_of(model)
    mics = fastest(shape, type_name, nodes, "mics", batch=batch)
    zero3 = fastest(shape, type_name, nodes, "zero3", batch=batch)
    if mics is None or zero3 is None:
        return None
    sent = per_step(
        zero3.grid,
        block_bytes=2 * shape.layers * shape.block_parameters,
        root_bytes=2 * shape.root_parameters,
        block_gradient_bytes=REDUCED_BYTES * shape.layers * shape.block_parameters,
        root_gradient_bytes=REDUCED_BYTES * shape.root_parameters,
        micro_steps=batch.micro_steps(zero3.grid.world_size),
    ).total
    return Point(
        type_name=type_name,
        model=model,
        nodes=nodes,
        micro_batch=batch.micro_batch,
        partition_size=mics.grid.partition_size,
        hierarchical=mics.grid.hierarchical,
        compute_per_traffic=zero3.time.compute_seconds * speeds_of(type_name).link_bytes_per_second / sent,
        speedup=zero3.time.step_seconds / mics.time.step_seconds,
        range_share=mics.time.range_share,
    )


def _machines(type_name: str, nodes: int) -> Machines:
    known = KNOWN[type_name]
    return Machines(nodes, known.devices, known.device_memory_bytes, known.device, known.bf16)


def _precision(type_name: str) -> Precision:
    return "bf16" if KNOWN[type_name].bf16 else "fp16"


def _grids(strategy: str, machines: Machines, partition: int | Auto) -> list[RankGrid]:
    n, k = machines.world_size, machines.devices_per_node
    sizes = partition_sizes(n, k) if partition == "auto" and free_partition(strategy) else (partition,)
    try:
        grids = [rank_grid(strategy, world_size=n, devices_per_node=k, partition=p) for p in sizes]
    except ValueError as error:
        raise UsageError(
            f"no such strategy on {machines.nodes} nodes x {k} devices", str(error), next="name another"
        ) from None
    return grids + [replace(grid, hierarchical=False) for grid in grids if grid.hierarchical]
