"""From the train section and the machines to the plan: every `auto` answered. Pure."""

from __future__ import annotations

from dataclasses import replace

from mics.config import Auto, Checkpointing, Precision, TrainConfig
from mics.shapes import ModelShape
from mics.strategies import Reshard, free_partition, rank_grid, reshard_of
from mics.topology import RankGrid
from mics.traffic import per_step

from micsctl.errors import UsageError
from micsctl.planner import reason
from micsctl.planner.memory import WIDTHS, estimate
from micsctl.planner.model import Machines, Memory, Plan
from micsctl.planner.partition import (
    MICRO_BATCHES,
    Choice,
    MemoryOf,
    Tries,
    candidates,
    choose,
    choose_at,
    memory_limit_bytes,
)


def plan(train: TrainConfig, machines: Machines) -> Plan:
    """Answer every `auto` of the train section for these machines, and say why.

    Automatic micro-batch and checkpointing are those that strategy mics gets with a free p, whatever the strategy, so
    that strategies compare with equal work; they need less only where the partition size that is asked for leaves no
    room. An explicit `train.partition` that does not fit is kept, with a warning in the reason.

    A model of the user's own cannot be weighed: its partition size and micro-batch must be given, and it is not
    checkpointed unless asked for.

    Raises UsageError for a partition size, a hierarchy or a `reshard_after_forward` that the machines cannot have, for
    a model that fits neither at the strategy's own p nor, where p is free, at any, and for one that cannot be weighed.
    """
    precision = train.precision if train.precision != "auto" else _precision(machines)
    if train.shape is None:
        return _unweighed(train, machines, precision)
    shape, zero3 = train.shape, RankGrid(machines.world_size, machines.devices_per_node, machines.world_size)

    def weigh(p: int, micro_batch: int, checkpointing: Checkpointing, reshard: Reshard) -> Memory:
        return estimate(
            shape,
            partition_size=p,
            micro_batch=micro_batch,
            sequence=train.sequence,
            precision=precision,
            device=machines.device,
            checkpointing=checkpointing,
            reshard=reshard,
            loss_chunk=train.loss_chunk,
        )

    def memory_of(p: int, micro_batch: int, checkpointing: Checkpointing) -> Memory:
        return weigh(p, micro_batch, checkpointing, _weighed_reshard(train, p))

    def memory_of_mics(p: int, micro_batch: int, checkpointing: Checkpointing) -> Memory:
        return weigh(p, micro_batch, checkpointing, True)

    chosen = _choose(train, machines, memory_of, memory_of_mics)
    grid = _grid(train, machines, chosen.partition_size)
    weighed = candidates(machines, chosen, memory_of)
    resolved = _resolved(train, grid, chosen, precision)
    reshard = _reshard(resolved, machines, grid)
    return Plan(
        machines=machines,
        train=resolved,
        parameters=shape.parameters,
        partition_size=grid.partition_size,
        hierarchical=grid.hierarchical,
        memory_limit_bytes=memory_limit_bytes(machines),
        candidates=weighed,
        traffic_bytes=traffic_bytes(shape, grid, precision, train.accumulation, reshard),
        traffic_zero3_bytes=traffic_bytes(shape, zero3, precision, train.accumulation, True),
        reason=reason.of_plan(train, resolved, machines, grid, weighed),
    )


def traffic_bytes(shape: ModelShape, grid: RankGrid, precision: Precision, micro_steps: int, reshard: Reshard) -> float:
    """Bytes sent per node and optimizer step (mics/traffic.py), for the widths of this precision."""
    width = WIDTHS[precision]
    blocks, root = shape.layers * shape.block_parameters, shape.root_parameters
    return per_step(
        grid,
        block_bytes=width.weights * blocks,
        root_bytes=width.weights * root,
        block_gradient_bytes=width.reduced * blocks,
        root_gradient_bytes=width.reduced * root,
        micro_steps=micro_steps,
        reshard=reshard,
    ).total


def _precision(machines: Machines) -> Precision:
    if machines.bf16:
        return "bf16"
    return "fp32" if machines.device == "cpu" else "fp16"


def _unweighed(train: TrainConfig, machines: Machines, precision: Precision) -> Plan:
    missing = ["train.micro_batch"] if train.micro_batch == "auto" else []
    if train.partition == "auto" and free_partition(train.strategy):
        missing.insert(0, "train.partition")
    if missing or train.micro_batch == "auto":
        raise reason.cannot_be_weighed(train, missing)
    grid = _grid(train, machines, train.partition)
    checkpointing: Checkpointing = "none" if train.checkpointing == "auto" else train.checkpointing
    resolved = _resolved(train, grid, Choice(grid.partition_size, train.micro_batch, checkpointing), precision)
    _reshard(resolved, machines, grid)
    return Plan(
        machines=machines,
        train=resolved,
        parameters=None,
        partition_size=grid.partition_size,
        hierarchical=grid.hierarchical,
        memory_limit_bytes=memory_limit_bytes(machines),
        candidates=(),
        traffic_bytes=None,
        traffic_zero3_bytes=None,
        reason=reason.of_unweighed(train, resolved, machines, grid),
    )


def _resolved(train: TrainConfig, grid: RankGrid, chosen: Choice, precision: Precision) -> TrainConfig:
    automatic = train.reshard_after_forward == "auto"
    return replace(
        train,
        partition=grid.partition_size,
        hierarchical=grid.hierarchical,
        micro_batch=chosen.micro_batch,
        precision=precision,
        checkpointing=chosen.checkpointing,
        reshard_after_forward=train.strategy != "zero2" if automatic else train.reshard_after_forward,
    )


def _choose(train: TrainConfig, machines: Machines, memory_of: MemoryOf, memory_of_mics: MemoryOf) -> Choice:
    tries = Tries(
        MICRO_BATCHES if train.micro_batch == "auto" else (train.micro_batch,),
        ("none", "full") if train.checkpointing == "auto" else (train.checkpointing,),
    )
    nowhere = _least(machines.world_size, tries)
    if train.partition == "auto" and free_partition(train.strategy):
        free = choose(machines, tries, memory_of)
        if free is None:
            raise reason.fits_nowhere(train, machines, nowhere, memory_of)
        return free

    asked = _grid(train, machines, train.partition).partition_size
    free = choose(machines, tries, memory_of_mics)
    if free is not None:
        tries = Tries(
            [b for b in tries.micro_batches if b <= free.micro_batch],
            tries.checkpointings[tries.checkpointings.index(free.checkpointing) :],
        )
    fitting, least = choose_at(machines, asked, tries, memory_of), _least(asked, tries)
    if fitting is not None:
        return fitting
    if train.partition != "auto":
        return least
    if free is None:
        raise reason.fits_nowhere(train, machines, nowhere, memory_of)
    needed = memory_of(least.partition_size, least.micro_batch, least.checkpointing)
    raise reason.strategy_does_not_fit(train, machines, asked, free, needed)


def _least(p: int, tries: Tries) -> Choice:
    """What needs the least memory at this p."""
    return Choice(p, tries.micro_batches[-1], tries.checkpointings[-1])


def _weighed_reshard(train: TrainConfig, p: int) -> Reshard:
    """How long weights stay gathered where p is weighed; a number of devices that p has not keeps a whole copy."""
    asked = train.reshard_after_forward
    if train.strategy == "zero2":
        return "step"
    if asked == "auto":
        return True
    return asked if isinstance(asked, bool) or 1 <= asked <= p else False


def _reshard(resolved: TrainConfig, machines: Machines, grid: RankGrid) -> Reshard:
    asked = resolved.reshard_after_forward
    assert asked != "auto"
    try:
        return reshard_of(resolved.strategy, asked, grid)
    except ValueError as error:
        raise _no_such_plan(machines, error, "train.reshard_after_forward: auto") from None


def _grid(train: TrainConfig, machines: Machines, partition: int | Auto) -> RankGrid:
    try:
        return rank_grid(
            train.strategy,
            world_size=machines.world_size,
            devices_per_node=machines.devices_per_node,
            partition=partition,
            hierarchical=train.hierarchical,
        )
    except ValueError as error:
        raise _no_such_plan(machines, error, "partition: auto and hierarchical: auto") from None


def _no_such_plan(machines: Machines, error: ValueError, instead: str) -> UsageError:
    return UsageError(
        f"no such plan for {machines.nodes} nodes x {machines.devices_per_node} devices",
        str(error),
        next=f"edit the train section of mics.yaml; {instead} let the plan choose",
    )
