"""From the train section and the machines to the plan: every `auto` answered. Pure."""

from __future__ import annotations

from dataclasses import replace

from mics.config import Auto, Precision, TrainConfig
from mics.shapes import ModelShape
from mics.strategies import free_partition, rank_grid
from mics.topology import RankGrid
from mics.traffic import Traffic, per_step

from micsctl.errors import UsageError
from micsctl.planner import reason
from micsctl.planner.memory import WIDTHS, estimate
from micsctl.planner.model import Machines, Memory, Plan
from micsctl.planner.partition import (
    MICRO_BATCHES,
    Choice,
    MemoryOf,
    candidates,
    choose,
    largest_micro_batch,
    memory_limit_bytes,
)


def plan(train: TrainConfig, machines: Machines) -> Plan:
    """Answer every `auto` of the train section for these machines, and say why.

    An automatic micro-batch is the one that a free p gets, whatever the strategy, so that strategies compare with equal
    work; it is smaller only where the partition size that is asked for leaves no room. An explicit `train.partition`
    that does not fit is kept, with a warning in the reason.

    Raises UsageError for a partition size or a hierarchy that the machines cannot have, and for a model that fits
    neither at the strategy's own p nor, where p is free, at any.
    """
    precision: Precision = ("bf16" if machines.bf16 else "fp32") if train.precision == "auto" else train.precision

    def memory_of(p: int, micro_batch: int) -> Memory:
        return estimate(
            train.shape,
            partition_size=p,
            micro_batch=micro_batch,
            sequence=train.sequence,
            precision=precision,
            device=machines.device,
        )

    chosen = _choose(train, machines, memory_of)
    grid = _grid(train, machines, chosen.partition_size)
    zero3 = RankGrid(machines.world_size, machines.devices_per_node, machines.world_size)
    weighed = candidates(machines, chosen.micro_batch, memory_of)
    resolved = replace(
        train,
        partition=grid.partition_size,
        hierarchical=grid.hierarchical,
        micro_batch=chosen.micro_batch,
        precision=precision,
    )
    return Plan(
        machines=machines,
        train=resolved,
        parameters=train.shape.parameters,
        partition_size=grid.partition_size,
        hierarchical=grid.hierarchical,
        memory_limit_bytes=memory_limit_bytes(machines),
        candidates=weighed,
        traffic_bytes=traffic(train.shape, grid, precision, train.accumulation).total,
        traffic_zero3_bytes=traffic(train.shape, zero3, precision, train.accumulation).total,
        reason=reason.of_plan(train, resolved, machines, grid, weighed),
    )


def traffic(shape: ModelShape, grid: RankGrid, precision: Precision, micro_steps: int) -> Traffic:
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
    )


def _choose(train: TrainConfig, machines: Machines, memory_of: MemoryOf) -> Choice:
    micro_batches = MICRO_BATCHES if train.micro_batch == "auto" else (train.micro_batch,)
    free = choose(machines, micro_batches, memory_of)
    if train.partition == "auto" and free_partition(train.strategy):
        if free is None:
            raise reason.fits_nowhere(train, machines, micro_batches[-1], memory_of)
        return free

    asked = _grid(train, machines, train.partition).partition_size
    tried = tuple(b for b in micro_batches if free is None or b <= free.micro_batch)
    fitting = largest_micro_batch(machines, tried, asked, memory_of)
    if fitting is not None:
        return Choice(asked, fitting)
    if train.partition != "auto":
        return Choice(asked, tried[-1])
    if free is None:
        raise reason.fits_nowhere(train, machines, tried[-1], memory_of)
    raise reason.strategy_does_not_fit(train, machines, asked, free, memory_of(asked, tried[-1]))


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
        raise UsageError(
            f"no such plan for {machines.nodes} nodes x {machines.devices_per_node} devices",
            str(error),
            next="edit the train section of mics.yaml; partition: auto and hierarchical: auto let the plan choose",
        ) from None
