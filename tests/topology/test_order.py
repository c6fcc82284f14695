from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from micsctl.topology.model import NodeFacts
from micsctl.topology.order import order

from .conftest import make_node


def nodes(*paths: str) -> list[NodeFacts]:
    """One node per word; its letters are the network nodes, coarsest first."""
    return [make_node(i, network_nodes=tuple(path[: n + 1] for n in range(len(path)))) for i, path in enumerate(paths)]


def indices(*paths: str) -> list[int]:
    return [node.index for node in order(nodes(*paths))]


def test_one_switch_or_none_keeps_the_index() -> None:
    assert indices("", "", "", "") == [0, 1, 2, 3]
    assert indices("abc", "abc", "abc") == [0, 1, 2]
    assert indices() == []


def test_nodes_under_one_switch_are_adjacent() -> None:
    assert indices("aax", "aay", "aax", "aay") == [0, 2, 1, 3]


def test_groups_under_a_common_coarser_switch_are_adjacent() -> None:
    assert indices("aax", "bbx", "aay", "bby", "aax") == [0, 4, 2, 1, 3]


def test_unknown_nodes_stay_together() -> None:
    assert indices("", "aax", "", "aax") == [0, 2, 1, 3]
    assert indices("aax", "", "aax", "") == [0, 2, 1, 3]


def test_paths_of_different_lengths() -> None:
    assert indices("ab", "a", "ab", "a")[0] == 0


PATHS = st.lists(st.lists(st.sampled_from("abcd"), max_size=4).map(tuple), max_size=12)


@given(PATHS, st.randoms())
def test_order_holds_its_promises(paths: list[tuple[str, ...]], shuffle) -> None:
    given_nodes = [make_node(i, network_nodes=path) for i, path in enumerate(paths)]
    found = order(given_nodes)
    assert sorted(node.index for node in found) == list(range(len(paths)))
    if found:
        assert found[0].index == 0
    runs = [(nearest, list(run)) for nearest, run in groupby(found, key=lambda node: node.network_nodes[-1:])]
    assert len({nearest for nearest, _ in runs}) == len(runs)
    assert all([node.index for node in run] == sorted(node.index for node in run) for _, run in runs)
    shuffled = list(given_nodes)
    shuffle.shuffle(shuffled)
    assert order(shuffled) == found


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), max_size=12))
def test_every_layer_of_a_real_tree_is_adjacent(places: list[tuple[int, int, int]]) -> None:
    paths = [(f"{a}", f"{a}{b}", f"{a}{b}{c}") for a, b, c in places]
    found = order([make_node(i, network_nodes=path) for i, path in enumerate(paths)])
    for depth in (1, 2, 3):
        runs = [key for key, _ in groupby(found, key=lambda node, depth=depth: node.network_nodes[:depth])]
        assert len(set(runs)) == len(runs)
