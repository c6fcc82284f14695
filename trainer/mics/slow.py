"""Which rank or group of ranks is slower than the rest, from one step's measurements. Pure.

In a synchronous step everybody waits for the slowest, so the length of the step says nothing. What tells is:

* forward, data, optimizer: the rank's own work, without waits. The slow rank has *more* than the median. The forward
  passes of the blocks stand for all computation: on CUDA the compute stream also waits for collectives, by an amount
  that nothing records, but not inside of these.
* a collective: its seconds on a rank are the transfer and, before it, the wait for the last to arrive. A slow rank
  arrives last and has *less*, so long seconds accuse nobody. The member that waited least shows the transfer alone: a
  group is measured by its minimum, and a group on a slow link has more than the median group. All members of a group
  are held up alike, so the group is named; where there is one group only, nothing can be compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mics.collectives import STAGES, StageName
from mics.metrics import RankStep
from mics.topology import Group, RankGrid
from mics.watch import readable

RATIO = 1.3  # to the median, from which a rank is slow
SHARE = 0.05  # of the step, that its excess must cost at least: twice of nothing is no news
PATIENCE = 5  # steps in a row before a note is written
REPEAT = 100  # steps until it is written again


@dataclass(frozen=True)
class Slow:
    """Ranks (one, or a group of a collective) that take `ratio` times the median in `part`."""

    ranks: Group
    part: str
    ratio: float


def slow_ranks(ranks: Sequence[RankStep], grid: RankGrid, *, step_seconds: float) -> list[Slow]:
    """Who was slow in this step, the slowest first. The median is the lower one: one of two can be slow. Pure."""
    alone: list[Group] = [(rank,) for rank in range(len(ranks))]
    least = SHARE * step_seconds
    found = _above("compute", alone, [rank.forward_seconds for rank in ranks], least_seconds=least)
    found += _above("data", alone, [rank.data_seconds for rank in ranks], least_seconds=least)
    found += _above("optimizer", alone, [rank.optimizer_seconds for rank in ranks], least_seconds=least)
    for stage in STAGES:
        groups = [group for group in stage_groups(grid, stage) if ranks[group[0]].stages[stage].calls]
        transfers = [min(ranks[rank].stages[stage].seconds for rank in group) for group in groups]
        found += _above(stage, groups, transfers, least_seconds=least)
    return sorted(found, key=lambda slow: -slow.ratio)


def _above(part: str, who: Sequence[Group], seconds: Sequence[float], *, least_seconds: float) -> list[Slow]:
    if not who:
        return []
    middle = statistics.median_low(seconds)
    ratios = [value / middle if middle else math.inf for value in seconds]
    return [
        Slow(ranks, part, ratio)
        for ranks, value, ratio in zip(who, seconds, ratios, strict=True)
        if ratio >= RATIO and value - middle > least_seconds
    ]


def stage_groups(grid: RankGrid, stage: StageName) -> tuple[Group, ...]:
    """The groups whose collectives are counted under `stage`. Pure."""
    if stage == "hop2":
        return grid.replication_groups()
    if stage.endswith("_across"):
        return grid.across_groups() if grid.hierarchical else grid.partition_groups()
    if grid.hierarchical:
        return grid.inside_groups()
    # In a node, or, with the weights kept per node after the forward pass, each node's part of it.
    width = grid.devices_inside
    return tuple(group[i : i + width] for group in grid.partition_groups() for i in range(0, len(group), width))


def in_words(slow: Slow, names: Sequence[str]) -> str:
    """rank 13, i-0abc, 2.1x slower in hop 1 across. names: of the nodes, by rank. Pure."""
    numbers = " and ".join(map(str, slow.ranks))
    nodes = " and ".join(dict.fromkeys(names[rank] for rank in slow.ranks))
    part = readable(slow.part)
    return f"rank{'s' if len(slow.ranks) > 1 else ''} {numbers}, {nodes}, {slow.ratio:.1f}x slower in {part}"


class Patience:
    """Lets through what holds for PATIENCE steps in a row, and again every REPEAT steps while it lasts."""

    def __init__(self) -> None:
        self._steps: dict[tuple[Group, str], int] = {}

    def lasting(self, found: Sequence[Slow]) -> list[Slow]:
        """Call it once a step, with what that step showed."""
        self._steps = {(slow.ranks, slow.part): self._steps.get((slow.ranks, slow.part), 0) + 1 for slow in found}
        return [slow for slow in found if self._steps[slow.ranks, slow.part] % REPEAT == PATIENCE]
