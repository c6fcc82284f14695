"""The search alone, over invented memories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from micsctl.planner.model import Machines, Memory
from micsctl.planner.partition import (
    MARGIN,
    MICRO_BATCHES,
    MemoryOf,
    candidates,
    choose,
    largest_micro_batch,
    memory_limit_bytes,
)


def machines(nodes: int, devices_per_node: int, device_memory_bytes: int = 1000) -> Machines:
    return Machines(nodes, devices_per_node, device_memory_bytes, "cpu", bf16=False)


def needing(states: float, per_sequence: float) -> MemoryOf:
    """A model whose states shrink with p and whose activations grow with the micro-batch."""
    return lambda p, micro_batch: Memory(states / p, 0.0, per_sequence * micro_batch, 0.0, 0.0)


clusters = st.builds(machines, st.integers(1, 16), st.sampled_from((1, 2, 4, 6, 8)))
models = st.builds(needing, st.floats(1, 1e6), st.floats(1, 1200))
tries = st.sampled_from((MICRO_BATCHES, (1,), (4,)))


@given(clusters, models, tries)
def test_p_divides_n_fits_or_fills_nodes_and_no_smaller_one_fits(
    there: Machines, memory_of: MemoryOf, micro_batches: tuple[int, ...]
) -> None:
    choice = choose(there, micro_batches, memory_of)
    n, k, limit = there.world_size, there.devices_per_node, MARGIN * there.device_memory_bytes
    if choice is None:
        assert memory_of(n, micro_batches[-1]).total > limit
        return
    p = choice.partition_size
    assert n % p == 0
    assert k % p == 0 or p % k == 0
    assert memory_of(p, choice.micro_batch).total <= limit
    allowed = [q for q in range(1, p) if n % q == 0 and (k % q == 0 or q % k == 0)]
    assert all(memory_of(q, choice.micro_batch).total > limit for q in allowed)


@given(clusters, models, tries)
def test_no_larger_micro_batch_would_have_fitted_in_the_same_reach(
    there: Machines, memory_of: MemoryOf, micro_batches: tuple[int, ...]
) -> None:
    choice = choose(there, micro_batches, memory_of)
    if choice is None:
        return
    k, limit = there.devices_per_node, memory_limit_bytes(there)
    reach = k if choice.partition_size <= k else there.world_size
    larger = [b for b in micro_batches if b > choice.micro_batch]
    assert all(memory_of(reach, b).total > limit for b in larger)


def test_a_micro_batch_of_one_inside_a_node_goes_before_a_larger_one_across_nodes() -> None:
    memory_of = needing(states=1600, per_sequence=100)
    choice = choose(machines(4, 2), MICRO_BATCHES, memory_of)
    assert choice is not None
    assert (choice.partition_size, choice.micro_batch) == (2, 1)  # though (8, 4) would fit too
    assert memory_of(8, 4).total <= 900


def test_inside_a_node_a_larger_micro_batch_goes_before_a_smaller_p() -> None:
    choice = choose(machines(1, 8), MICRO_BATCHES, needing(states=800, per_sequence=90))
    assert choice is not None
    assert (choice.partition_size, choice.micro_batch) == (8, 8)


def test_nothing_fits() -> None:
    assert choose(machines(2, 2), MICRO_BATCHES, needing(states=4000, per_sequence=1)) is None
    assert largest_micro_batch(machines(2, 2), MICRO_BATCHES, 4, needing(4000, 1)) is None


def test_the_largest_micro_batch_at_one_p() -> None:
    assert largest_micro_batch(machines(2, 2), MICRO_BATCHES, 4, needing(400, 150)) == 4


def test_the_margin_is_kept() -> None:
    assert largest_micro_batch(machines(1, 1), (1,), 1, needing(800, 100)) == 1
    assert largest_micro_batch(machines(1, 1), (1,), 1, needing(800, 101)) is None


def test_candidates_are_all_sizes_in_order() -> None:
    found = candidates(machines(3, 2), 1, needing(1200, 100))
    assert [(c.partition_size, c.fits) for c in found] == [(1, False), (2, True), (6, True)]
