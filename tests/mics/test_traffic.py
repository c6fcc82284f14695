"""The traffic formulas against a simulation that moves every shard over its ring and counts what leaves each node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from mics.strategies import Reshard, shared_copies
from mics.topology import Group, RankGrid, group_of, partition_sizes
from mics.traffic import Traffic, crosses_node, hop2, one_pass, per_step

GRIDS = [
    RankGrid(nodes * k, k, p, hierarchical)
    for nodes in (1, 2, 3, 4, 6)
    for k in (1, 2, 3, 4)
    for p in partition_sizes(nodes * k, k)
    for hierarchical in ((False, True) if p > k else (False,))
]


def name_of(grid: RankGrid) -> str:
    stages = "hierarchical" if grid.hierarchical else "flat"
    return f"n{grid.world_size}-k{grid.devices_per_node}-p{grid.partition_size}-{stages}"


every_grid = pytest.mark.parametrize("grid", GRIDS, ids=name_of)

Held = dict[int, list[int]]  # by rank: values in the order of the process group; one value is one unit of bytes


@dataclass
class Wire:
    """Counts the units that each node sends to other nodes."""

    grid: RankGrid
    sent: Counter[int] = field(default_factory=Counter)

    def send(self, source: int, target: int, units: int) -> None:
        if self.grid.node_of(source) != self.grid.node_of(target):
            self.sent[self.grid.node_of(source)] += units

    def per_node(self) -> int:
        """What one node sent; all must have sent the same."""
        counts = {self.sent[node] for node in range(self.grid.world_size // self.grid.devices_per_node)}
        assert len(counts) == 1
        return counts.pop()


def ring_gather(wire: Wire, group: Group, held: Held) -> None:
    """Every member ends with the values of all, in the group's order."""
    size = len(group)
    parts = [{i: held[rank]} for i, rank in enumerate(group)]
    for step in range(size - 1):
        moving = [(i, (i - step) % size) for i in range(size)]
        for i, part in moving:
            values = parts[i][part]
            wire.send(group[i], group[(i + 1) % size], len(values))
            parts[(i + 1) % size][part] = values
    for i, rank in enumerate(group):
        held[rank] = [value for part in range(size) for value in parts[i][part]]


def ring_reduce_scatter(wire: Wire, group: Group, held: Held) -> None:
    """Member i ends with the sum over the members of the i-th part."""
    size = len(group)
    width = len(held[group[0]]) // size
    parts = [[held[rank][j * width : (j + 1) * width] for j in range(size)] for rank in group]
    for step in range(size - 1):
        moving = [(i, (i - 1 - step) % size) for i in range(size)]
        values = [list(parts[i][part]) for i, part in moving]
        for (i, part), sent in zip(moving, values, strict=True):
            target = (i + 1) % size
            wire.send(group[i], group[target], width)
            parts[target][part] = [a + b for a, b in zip(parts[target][part], sent, strict=True)]
    for i, rank in enumerate(group):
        held[rank] = parts[i][i]


def gather(grid: RankGrid, wire: Wire, held: Held) -> None:
    stages = (grid.across_groups(), grid.inside_groups()) if grid.hierarchical else (grid.partition_groups(),)
    for groups in stages:
        for group in groups:
            ring_gather(wire, group, held)


def reduce_scatter(grid: RankGrid, wire: Wire, held: Held) -> None:
    stages = (grid.inside_groups(), grid.across_groups()) if grid.hierarchical else (grid.partition_groups(),)
    for groups in stages:
        for group in groups:
            ring_reduce_scatter(wire, group, held)


def place(grid: RankGrid, rank: int) -> int:
    """Which shard the rank holds."""
    return group_of(rank, grid.partition_groups()).index(rank)


@every_grid
def test_a_gather_brings_every_shard_everywhere_and_sends_what_the_formula_says(grid: RankGrid) -> None:
    wire = Wire(grid)
    held = {rank: [place(grid, rank)] for rank in range(grid.world_size)}
    gather(grid, wire, held)
    assert all(values == list(range(grid.partition_size)) for values in held.values())
    assert wire.per_node() == pytest.approx(one_pass(grid, grid.partition_size))


@every_grid
def test_hop_1_and_hop_2_sum_over_all_ranks_and_send_what_the_formulas_say(grid: RankGrid) -> None:
    p, r = grid.partition_size, grid.replicas
    # Rank i contributes 1000 i + j to shard j. Each value stands for r units, so that hop 2 can cut it into r parts.
    held = {rank: [1000 * rank + shard for shard in range(p)] for rank in range(grid.world_size)}
    first = Wire(grid)
    reduce_scatter(grid, first, held)
    for rank, values in held.items():
        shard = place(grid, rank)
        assert values == [sum(1000 * peer + shard for peer in group_of(rank, grid.partition_groups()))]
    assert first.per_node() == pytest.approx(one_pass(grid, p))

    second = Wire(grid)
    parts = {rank: values * r for rank, values in held.items()}
    for group in grid.replication_groups():
        ring_reduce_scatter(second, group, parts)
        ring_gather(second, group, parts)
    for rank, values in parts.items():
        assert values == [sum(1000 * peer + place(grid, rank) for peer in range(grid.world_size))] * r
    assert second.per_node() == pytest.approx(hop2(grid, p * r))


@every_grid
def test_crosses_node_finds_the_rings_that_leave(grid: RankGrid) -> None:
    groups = grid.partition_groups()
    leaving = [rank for group in groups for rank in group if crosses_node(rank, group, grid.devices_per_node)]
    if grid.partition_size <= grid.devices_per_node:
        assert leaving == []
    elif grid.hierarchical:
        assert len(leaving) == grid.world_size  # why a flat ring must not run on this order
    else:
        assert len(leaving) == grid.world_size // grid.devices_per_node  # each node is left once


def test_a_flat_ring_on_the_hierarchical_order_sends_more_than_on_the_natural_one() -> None:
    permuted, natural = RankGrid(8, 2, 8, hierarchical=True), RankGrid(8, 2, 8)
    counts = []
    for grid in (permuted, natural):
        wire = Wire(natural)
        held = {rank: [rank] for rank in range(8)}
        for group in grid.partition_groups():
            ring_gather(wire, group, held)
        counts.append(wire.per_node())
    assert counts == [14, 7]


def step(grid: RankGrid, micro_steps: int = 4, reshard: Reshard = True) -> Traffic:
    """A model of 90 units in blocks and 10 in the root, gradients twice as wide."""
    return per_step(
        grid,
        block_bytes=90,
        root_bytes=10,
        block_gradient_bytes=180,
        root_gradient_bytes=20,
        micro_steps=micro_steps,
        reshard=reshard,
    )


def test_a_step_gathers_blocks_twice_and_the_root_once_per_micro_step() -> None:
    grid = RankGrid(8, 2, 4)
    assert step(grid).gather == pytest.approx(4 * (2 * 90 + 10) * 3 / 4)
    assert step(grid).reduce_scatter == pytest.approx(4 * 200 * 3 / 4)
    assert step(grid).hop2 == pytest.approx(2 * 1 / 2 * 2 / 4 * 200)


def test_a_shared_copy_sends_what_weights_kept_until_the_backward_pass_send() -> None:
    grid = RankGrid(8, 2, 4, hierarchical=True)
    assert step(grid, reshard=False).gather == pytest.approx(4 * (90 + 10) * 2 / 4)
    assert step(grid, reshard=2) == step(grid, reshard=False)


def test_zero2_gathers_once_per_step() -> None:
    """(n-1)/n (s Mg + Mw): Rajbhandari et al., ZeRO, arXiv 1910.02054, section 7, with s micro-steps."""
    grid = RankGrid(8, 2, 8)
    assert step(grid, reshard="step").total == pytest.approx(7 / 8 * (4 * 200 + 100))
    assert step(grid, 1, reshard="step") == step(grid, 1, reshard=False)


@every_grid
def test_weights_that_live_longer_send_no_more(grid: RankGrid) -> None:
    lives: list[Reshard] = [True, *shared_copies(grid), False, "step"]
    sent = [step(grid, reshard=reshard) for reshard in lives]
    assert [traffic.gather for traffic in sent] == sorted((traffic.gather for traffic in sent), reverse=True)
    assert {(traffic.reduce_scatter, traffic.hop2) for traffic in sent} == {(sent[0].reduce_scatter, sent[0].hop2)}


def test_zero3_has_no_hop_2() -> None:
    traffic = step(RankGrid(8, 2, 8))
    assert traffic.hop2 == 0
    assert traffic.total == pytest.approx(7 / 8 * 4 * (190 + 200))


def test_inside_a_node_only_hop_2_is_left_and_it_does_not_depend_on_the_micro_steps() -> None:
    grid = RankGrid(8, 2, 2)
    assert step(grid, 1) == step(grid, 16) == Traffic(0, 0, 2 * 3 / 4 * 200)


def test_ddp_is_one_all_reduce() -> None:
    assert step(RankGrid(8, 2, 1)).total == pytest.approx(2 * 7 / 8 * 200)


def test_one_node_sends_nothing() -> None:
    assert all(step(RankGrid(8, 8, p)).total == 0 for p in (1, 2, 4, 8))


@every_grid
def test_hierarchy_never_sends_more(grid: RankGrid) -> None:
    flat = RankGrid(grid.world_size, grid.devices_per_node, grid.partition_size)
    assert step(grid).total <= step(flat).total
