from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.strategies import STRATEGIES, free_partition, rank_grid
from mics.topology import RankGrid, partition_sizes


def grid(
    strategy: str, partition: int | Literal["auto"] = "auto", hierarchical: bool | Literal["auto"] = "auto"
) -> RankGrid:
    return rank_grid(strategy, world_size=8, devices_per_node=2, partition=partition, hierarchical=hierarchical)


def test_the_names() -> None:
    assert STRATEGIES == ("mics", "mics-flat", "zero3", "ddp")
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
        ("zero2", "auto", "auto", "unknown strategy 'zero2'; known: mics, mics-flat, zero3, ddp"),
        ("mics", "auto", "auto", "needs a partition size"),
        ("mics-flat", "auto", "auto", "needs a partition size"),
        ("zero3", 4, "auto", "zero3 fixes the partition size to 8, not 4"),
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
