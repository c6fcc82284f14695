"""Strategies are names for (p, hierarchical, reshard). Pure, standard library only.

`Reshard` says how long the gathered weights of a block live:

True    until the end of its forward pass; gathered again for the backward pass
False   until the end of its backward pass
k       between forward and backward every k devices of a node share one copy, so that the gather for the backward pass
        stays inside the node
"step"  over all micro-steps, until the optimizer has changed them
"""

from __future__ import annotations

from typing import Literal, get_args

from mics.topology import RankGrid

StrategyName = Literal["mics", "mics-flat", "zero3", "zero2", "ddp"]
STRATEGIES: tuple[str, ...] = get_args(StrategyName)
Reshard = bool | int | Literal["step"]


def free_partition(strategy: str) -> bool:
    """Whether the strategy leaves the partition size open (the planner chooses it)."""
    return strategy in ("mics", "mics-flat")


def rank_grid(
    strategy: str,
    *,
    world_size: int,
    devices_per_node: int,
    partition: int | Literal["auto"],
    hierarchical: bool | Literal["auto"] = "auto",
) -> RankGrid:
    """The rank grid that a strategy stands for.

    mics       p as given; hierarchical where the partition group spans nodes of several devices, unless switched off
    mics-flat  p as given, never hierarchical
    zero3      p = n, flat: ZeRO-3 / FSDP full sharding
    zero2      the same grid; weights are gathered once per optimizer step: ZeRO-2
    ddp        p = 1: every device holds everything

    Raises ValueError for an unknown name, for "auto" where the strategy leaves p open (plan first), and for a p or a
    hierarchy that contradicts the strategy.
    """
    fixed = {"zero3": world_size, "zero2": world_size, "ddp": 1}.get(strategy)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if fixed is None:
        if partition == "auto":
            raise ValueError(f"strategy {strategy} needs a partition size; the planner chooses it")
        size = partition
    elif partition not in ("auto", fixed):
        raise ValueError(f"strategy {strategy} fixes the partition size to {fixed}, not {partition}")
    else:
        size = fixed
    if strategy != "mics" and hierarchical is True:
        raise ValueError(f"strategy {strategy} is flat; hierarchical collectives belong to strategy mics")
    has_two_stages = size > devices_per_node > 1
    two_stage = strategy == "mics" and (has_two_stages if hierarchical == "auto" else hierarchical)
    return RankGrid(world_size, devices_per_node, size, hierarchical=two_stage)


def reshard_of(strategy: str, asked: bool | int, grid: RankGrid) -> Reshard:
    """How long gathered weights live under a strategy, where `reshard_after_forward: asked` is in the run.

    Raises ValueError where a number of devices contradicts the strategy, or crosses nodes (see `check_reshard`).
    """
    if strategy != "zero2":
        check_reshard(asked, grid)
        return asked
    if not isinstance(asked, bool):
        raise ValueError(
            f"strategy zero2 keeps gathered weights until the step; reshard_after_forward {asked} does not"
        )
    return "step"


def check_reshard(reshard: Reshard, grid: RankGrid) -> None:
    """Raises ValueError where `reshard` is a number of devices that cannot share a copy inside one node."""
    if isinstance(reshard, bool) or reshard == "step" or reshard in shared_copies(grid):
        return
    choices = ", ".join(["true", "false", *map(str, shared_copies(grid))])
    raise ValueError(
        f"reshard_after_forward {reshard}: a copy is shared by devices of one node and one partition group, which has "
        f"{grid.devices_inside} on a node; it may be {choices}"
    )


def shared_copies(grid: RankGrid) -> tuple[int, ...]:
    """Every number of devices that can share one copy of a partition group's weights inside a node, ascending."""
    return tuple(k for k in range(2, grid.devices_inside + 1) if grid.devices_inside % k == 0)
