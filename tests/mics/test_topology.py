"""The rank grid: its groups partition the ranks, and the order inside them is the one the engine relies on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.topology import Group, RankGrid, group_of, partition_sizes


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    nodes, k = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    p = draw(st.sampled_from(partition_sizes(nodes * k, k)))
    return RankGrid(nodes * k, k, p, hierarchical=p > k and draw(st.booleans()))


hierarchical_grids = grids().filter(lambda grid: grid.hierarchical)


def assert_partitions(groups: tuple[Group, ...], world_size: int) -> None:
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))


@given(st.integers(1, 20), st.integers(1, 8))
def test_partition_sizes_are_those_that_divide_n_and_fit_in_or_fill_nodes(nodes: int, k: int) -> None:
    n = nodes * k
    sizes = partition_sizes(n, k)
    assert list(sizes) == sorted(sizes)
    assert {1, k, n} <= set(sizes)
    for p in range(1, n + 1):
        allowed = n % p == 0 and (p % k == 0 or k % p == 0)
        assert (p in sizes) == allowed
        if not allowed:
            with pytest.raises(ValueError, match="it may be 1, "):
                RankGrid(n, k, p)


@given(grids())
def test_partition_groups_and_replication_groups_cross_in_one_rank(grid: RankGrid) -> None:
    partition, replication = grid.partition_groups(), grid.replication_groups()
    assert_partitions(partition, grid.world_size)
    assert_partitions(replication, grid.world_size)
    assert {len(group) for group in partition} == {grid.partition_size}
    assert {len(group) for group in replication} == {grid.replicas}
    assert all(len(set(one) & set(other)) == 1 for one in partition for other in replication)


@given(grids())
def test_a_replication_group_holds_one_shard(grid: RankGrid) -> None:
    for group in grid.replication_groups():
        assert len({group_of(rank, grid.partition_groups()).index(rank) for rank in group}) == 1
        assert list(group) == sorted(group)  # so that its ring leaves a node once


@given(grids())
def test_a_partition_group_touches_as_few_nodes_as_it_can(grid: RankGrid) -> None:
    for group in grid.partition_groups():
        devices = Counter(grid.node_of(rank) for rank in group)
        assert len(devices) == grid.nodes_per_partition
        assert set(devices.values()) == {grid.devices_inside}
    assert grid.nodes_per_partition * grid.devices_inside == grid.partition_size


@given(grids())
def test_flat_grids_keep_the_natural_order(grid: RankGrid) -> None:
    flat = RankGrid(grid.world_size, grid.devices_per_node, grid.partition_size)
    assert all(list(group) == sorted(group) for group in flat.partition_groups())
    assert {frozenset(g) for g in flat.partition_groups()} == {frozenset(g) for g in grid.partition_groups()}


@given(hierarchical_grids)
def test_the_two_stages_cover_a_partition_group(grid: RankGrid) -> None:
    across, inside = grid.across_groups(), grid.inside_groups()
    assert_partitions(across, grid.world_size)
    assert_partitions(inside, grid.world_size)
    for rank in range(grid.world_size):
        mine, my_node = group_of(rank, across), group_of(rank, inside)
        assert {grid.node_of(peer) for peer in my_node} == {grid.node_of(rank)}
        assert len({grid.node_of(peer) for peer in mine}) == len(mine) == grid.nodes_per_partition
        assert len({peer % grid.devices_per_node for peer in mine}) == 1
        reached = {second for first in mine for second in group_of(first, inside)}
        assert reached == set(group_of(rank, grid.partition_groups()))


@given(hierarchical_grids)
def test_the_gather_across_nodes_fills_one_contiguous_column(grid: RankGrid) -> None:
    width = grid.nodes_per_partition
    for group in grid.partition_groups():
        columns = [group[i : i + width] for i in range(0, len(group), width)]
        assert set(columns) <= set(grid.across_groups())
        for node in range(width):  # the ranks of one node meet in the order of their columns
            assert tuple(column[node] for column in columns) in grid.inside_groups()


def test_two_nodes_of_two_devices() -> None:
    grid = RankGrid(4, 2, 4, hierarchical=True)
    assert grid.partition_groups() == ((0, 2, 1, 3),)
    assert grid.across_groups() == ((0, 2), (1, 3))
    assert grid.inside_groups() == ((0, 1), (2, 3))
    assert RankGrid(4, 2, 4).partition_groups() == ((0, 1, 2, 3),)


def test_four_nodes_of_two_devices_in_two_replicas() -> None:
    grid = RankGrid(8, 2, 4, hierarchical=True)
    assert grid.partition_groups() == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert grid.replication_groups() == ((0, 4), (2, 6), (1, 5), (3, 7))


@pytest.mark.parametrize(
    ("n", "k", "p", "hierarchical", "message"),
    [
        (8, 2, 3, False, "partition size 3 does not divide the world size 8; it may be 1, 2, 4, 8"),
        (12, 4, 6, False, "neither fits in a node nor fills whole nodes of 4 devices; it may be 1, 2, 4, 12"),
        (7, 2, 1, False, "not a whole number of nodes"),
        (8, 2, 0, False, "at least 1"),
        (0, 1, 1, False, "at least 1"),
        (8, 2, 2, True, "spans nodes"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(n: int, k: int, p: int, hierarchical: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankGrid(n, k, p, hierarchical)


def test_a_flat_grid_has_no_stages() -> None:
    for stage in (RankGrid(4, 2, 4).across_groups, RankGrid(4, 2, 4).inside_groups):
        with pytest.raises(ValueError, match="no stages"):
            stage()
