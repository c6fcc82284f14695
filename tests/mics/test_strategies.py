from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.strategies import STRATEGIES, check_reshard, free_partition, rank_grid, reshard_of, shared_copies
from mics.topology import RankGrid, partition_sizes


def grid(
    strategy: str, partition: int | Literal["auto"] = "auto", hierarchical: bool | Literal["auto"] = "auto"
) -> RankGrid:
    return rank_grid(strategy, world_size=8, devices_per_node=2, partition=partition, hierarchical=hierarchical)


def test_the_names() -> None:
    assert STRATEGIES == ("mics", "mics-flat", "zero3", "zero2", "ddp")
    assert [name for name in STRATEGIES if free_partition(name)] == ["mics", "mics-flat"]


@pytest.mark.parametrize(
    ("strategy", "partition", "expected"),
    [
        ("mics", 2, RankGrid(8, 2, 2)),
        ("mics", 4, RankGrid(8, 2, 4, hierarchical=True)),
        ("mics", 8, RankGrid(8, 2, 8, hierarchical=True)),
        ("mics-flat", 4, RankGrid(8, 2, 4)),
        ("zero3", "auto", RankGrid(8, 2, 8)),
        ("zero3", 8, RankGrid(8, 2, 8)),
        ("zero2", "auto", RankGrid(8, 2, 8)),
        ("ddp", "auto", RankGrid(8, 2, 1)),
        ("ddp", 1, RankGrid(8, 2, 1)),
    ],
)
def test_what_a_strategy_stands_for(strategy: str, partition: int | Literal["auto"], expected: RankGrid) -> None:
    assert grid(strategy, partition) == expected


def test_hierarchy_can_be_switched_off() -> None:
    assert grid("mics", 4, hierarchical=False) == RankGrid(8, 2, 4)


def test_nodes_of_one_device_have_no_second_stage() -> None:
    assert not rank_grid("mics", world_size=4, devices_per_node=1, partition=4).hierarchical


@pytest.mark.parametrize(
    ("strategy", "partition", "hierarchical", "message"),
    [
        ("zero1", "auto", "auto", "unknown strategy 'zero1'; known: mics, mics-flat, zero3, zero2, ddp"),
        ("mics", "auto", "auto", "needs a partition size"),
        ("mics-flat", "auto", "auto", "needs a partition size"),
        ("zero3", 4, "auto", "zero3 fixes the partition size to 8, not 4"),
        ("zero2", 2, "auto", "zero2 fixes the partition size to 8, not 2"),
        ("ddp", 2, "auto", "ddp fixes the partition size to 1, not 2"),
        ("zero3", "auto", True, "zero3 is flat"),
        ("mics-flat", 4, True, "mics-flat is flat"),
        ("mics", 2, True, "spans nodes"),
        ("mics", 3, "auto", "does not divide"),
    ],
)
def test_a_contradiction_is_refused(
    strategy: str, partition: int | Literal["auto"], hierarchical: bool | Literal["auto"], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        grid(strategy, partition, hierarchical)


@given(st.data(), st.sampled_from(STRATEGIES), st.integers(1, 12), st.integers(1, 8))
def test_only_mics_across_nodes_is_hierarchical_and_permutes(
    data: st.DataObject, strategy: str, nodes: int, k: int
) -> None:
    free = st.sampled_from(partition_sizes(nodes * k, k))
    p: int | Literal["auto"] = data.draw(free) if free_partition(strategy) else "auto"
    made = rank_grid(strategy, world_size=nodes * k, devices_per_node=k, partition=p)
    assert made.hierarchical == (strategy == "mics" and made.partition_size > k > 1)
    natural = all(list(group) == sorted(group) for group in made.partition_groups())
    assert natural or made.hierarchical


def test_only_zero2_keeps_weights_until_the_step() -> None:
    for strategy in STRATEGIES:
        made = grid(strategy, 4 if free_partition(strategy) else "auto")
        for asked in (True, False):
            assert reshard_of(strategy, asked, made) == ("step" if strategy == "zero2" else asked)


def test_copies_are_shared_inside_a_node() -> None:
    hierarchical = RankGrid(16, 4, 8, hierarchical=True)
    assert (
        shared_copies(hierarchical) == shared_copies(RankGrid(16, 4, 16)) == shared_copies(RankGrid(16, 4, 4)) == (2, 4)
    )
    assert shared_copies(RankGrid(16, 4, 2)) == (2,)
    assert shared_copies(RankGrid(16, 4, 1)) == shared_copies(RankGrid(4, 1, 4)) == ()
    assert reshard_of("mics", 4, hierarchical) == 4


@pytest.mark.parametrize(
    ("strategy", "asked", "message"),
    [
        ("mics", 8, "8: a copy is shared by devices of one node .* has 4 on a node; it may be true, false, 2, 4"),
        ("mics", 3, "it may be true, false, 2, 4"),
        ("mics", 1, "it may be true, false, 2, 4"),
        ("mics", 0, "it may be true, false, 2, 4"),
        ("ddp", 2, "has 1 on a node; it may be true, false$"),
        ("zero2", 4, "zero2 keeps gathered weights until the step"),
    ],
)
def test_a_copy_that_cannot_be_shared_is_refused(strategy: str, asked: int, message: str) -> None:
    made = rank_grid(strategy, world_size=16, devices_per_node=4, partition=8 if strategy == "mics" else "auto")
    with pytest.raises(ValueError, match=message):
        reshard_of(strategy, asked, made)


@given(st.data(), st.integers(1, 12), st.integers(1, 8))
def test_devices_that_share_a_copy_are_on_one_node_and_in_one_partition_group(
    data: st.DataObject, nodes: int, k: int
) -> None:
    p = data.draw(st.sampled_from(partition_sizes(nodes * k, k)))
    made = RankGrid(nodes * k, k, p, hierarchical=p > k and data.draw(st.booleans()))
    for devices in shared_copies(made):
        check_reshard(devices, made)
        groups = made.sharing_groups(devices)
        assert sorted(rank for group in groups for rank in group) == list(range(made.world_size))
        for group in groups:
            assert len(group) == devices
            assert len({made.node_of(rank) for rank in group}) == 1
            assert any(set(group) <= set(partition) for partition in made.partition_groups())
