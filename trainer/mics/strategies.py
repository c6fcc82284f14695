"""Strategies are names for (p, hierarchical, reshard). Pure, standard library only."""

from __future__ import annotations

from typing import Literal, get_args

from mics.topology import RankGrid

StrategyName = Literal["mics", "mics-flat", "zero3", "ddp"]
STRATEGIES: tuple[str, ...] = get_args(StrategyName)


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
    ddp        p = 1: every device holds everything

    Raises ValueError for an unknown name, for "auto" where the strategy leaves p open (plan first), and for a p or a
    hierarchy that contradicts the strategy.
    """
    fixed = {"zero3": world_size, "ddp": 1}.get(strategy)
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
