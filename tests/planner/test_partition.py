"""The search alone, over invented memories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mics.config import Checkpointing

from micsctl.planner.model import Machines, Memory
from micsctl.planner.partition import (
    MARGIN,
    MICRO_BATCHES,
    Choice,
    MemoryOf,
    Tries,
    candidates,
    choose,
    choose_at,
    memory_limit_bytes,
)

BOTH: tuple[Checkpointing, ...] = ("none", "full")
SHARE = {"none": 1.0, "selective": 0.7, "full": 0.1}  # of the activations that are kept


def machines(nodes: int, devices_per_node: int, device_memory_bytes: int = 1000) -> Machines:
    return Machines(nodes, devices_per_node, device_memory_bytes, "cpu", bf16=False)


def needing(states: float, per_sequence: float) -> MemoryOf:
    """A model whose states shrink with p and whose activations grow with the micro-batch."""
    return lambda p, micro_batch, again: Memory(states / p, 0.0, per_sequence * micro_batch * SHARE[again], 0.0, 0.0)


def tries(*micro_batches: int, checkpointings: tuple[Checkpointing, ...] = ("none",)) -> Tries:
    return Tries(micro_batches or MICRO_BATCHES, checkpointings)


clusters = st.builds(machines, st.integers(1, 16), st.sampled_from((1, 2, 4, 6, 8)))
models = st.builds(needing, st.floats(1, 1e6), st.floats(1, 1200))
asked = st.builds(
    Tries, st.sampled_from((MICRO_BATCHES, (1,), (4,))), st.sampled_from((BOTH, ("none",), ("full",), ("selective",)))
)


@given(clusters, models, asked)
def test_p_divides_n_fits_or_fills_nodes_and_no_smaller_one_fits(
    there: Machines, memory_of: MemoryOf, wanted: Tries
) -> None:
    choice = choose(there, wanted, memory_of)
    n, k, limit = there.world_size, there.devices_per_node, MARGIN * there.device_memory_bytes
    if choice is None:
        assert memory_of(n, wanted.micro_batches[-1], wanted.checkpointings[-1]).total > limit
        return
    p = choice.partition_size
    assert n % p == 0
    assert k % p == 0 or p % k == 0
    assert memory_of(p, choice.micro_batch, choice.checkpointing).total <= limit
    allowed = [q for q in range(1, p) if n % q == 0 and (k % q == 0 or q % k == 0)]
    assert all(memory_of(q, choice.micro_batch, choice.checkpointing).total > limit for q in allowed)


@given(clusters, models, asked)
def test_no_larger_micro_batch_would_have_fitted_in_the_same_reach(
    there: Machines, memory_of: MemoryOf, wanted: Tries
) -> None:
    choice = choose(there, wanted, memory_of)
    if choice is None:
        return
    k, limit = there.devices_per_node, memory_limit_bytes(there)
    reach = k if choice.partition_size <= k else there.world_size
    larger = [b for b in wanted.micro_batches if b > choice.micro_batch]
    assert all(memory_of(reach, b, choice.checkpointing).total > limit for b in larger)


@given(clusters, models)
def test_activations_are_computed_again_only_where_a_node_cannot_hold_them(
    there: Machines, memory_of: MemoryOf
) -> None:
    choice = choose(there, tries(checkpointings=BOTH), memory_of)
    if choice is None:
        return
    k, limit = there.devices_per_node, memory_limit_bytes(there)
    if choice.checkpointing == "full":
        assert memory_of(k, 1, "none").total > limit
    if choice.partition_size > k:
        assert memory_of(k, 1, "full").total > limit
        assert choice.checkpointing == "full"


def test_a_micro_batch_of_one_inside_a_node_goes_before_a_larger_one_across_nodes() -> None:
    memory_of = needing(states=1600, per_sequence=100)
    choice = choose(machines(4, 2), tries(), memory_of)
    assert choice == Choice(2, 1, "none")  # though (8, 4) would fit too
    assert memory_of(8, 4, "none").total <= 900


def test_inside_a_node_a_larger_micro_batch_goes_before_a_smaller_p() -> None:
    assert choose(machines(1, 8), tries(), needing(states=800, per_sequence=90)) == Choice(8, 8, "none")


def test_checkpointing_goes_before_a_p_that_spans_nodes() -> None:
    memory_of = needing(states=1600, per_sequence=300)
    assert choose(machines(4, 2), tries(checkpointings=BOTH), memory_of) == Choice(2, 2, "full")
    assert choose(machines(4, 2), tries(), memory_of) == Choice(8, 2, "none")


def test_where_p_must_span_nodes_it_is_the_smallest_with_checkpointing() -> None:
    memory_of = needing(states=6000, per_sequence=50)
    assert choose(machines(8, 2), tries(checkpointings=BOTH), memory_of) == Choice(8, 8, "full")
    assert choose(machines(8, 2), tries(), memory_of) == Choice(16, 8, "none")


def test_nothing_fits() -> None:
    memory_of = needing(states=4000, per_sequence=1)
    assert choose(machines(2, 2), tries(checkpointings=BOTH), memory_of) is None
    assert choose_at(machines(2, 2), 4, tries(), memory_of) is None


def test_the_largest_micro_batch_at_one_p() -> None:
    assert choose_at(machines(2, 2), 4, tries(), needing(400, 150)) == Choice(4, 4, "none")


def test_the_margin_is_kept() -> None:
    assert choose_at(machines(1, 1), 1, tries(1), needing(800, 100)) is not None
    assert choose_at(machines(1, 1), 1, tries(1), needing(800, 101)) is None


def test_candidates_are_all_sizes_in_order() -> None:
    found = candidates(machines(3, 2), Choice(2, 1, "none"), needing(1200, 100))
    assert [(c.partition_size, c.fits) for c in found] == [(1, False), (2, True), (6, True)]
