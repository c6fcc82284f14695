"""Which sample reads which window, and which rank gets which sample."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.data.noise import draw, word
from mics.data.order import deal, windows_at, windows_of

small = st.integers(1, 6)
shapes = st.builds(lambda n, b, s, steps: (n, b, s, steps), small, small, st.integers(1, 4), st.integers(1, 5))


def dealt_step(first, world_size, micro_batch, accumulation):
    return [
        sample
        for rank in range(world_size)
        for micro in deal(first, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation)
        for sample in micro
    ]


@given(first=st.integers(0, 10**6), world_size=small, micro_batch=small, accumulation=small)
def test_a_global_batch_is_dealt_whole_and_once(first, world_size, micro_batch, accumulation):
    dealt = dealt_step(first, world_size, micro_batch, accumulation)
    assert sorted(dealt) == list(range(first, first + world_size * micro_batch * accumulation))


@given(world_size=small, micro_batch=small, accumulation=small)
def test_every_rank_gets_the_same_number_of_full_micro_steps(world_size, micro_batch, accumulation):
    for rank in range(world_size):
        dealt = deal(0, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation)
        assert [len(micro) for micro in dealt] == [micro_batch] * accumulation


@settings(deadline=None)
@given(stages=st.lists(shapes, min_size=1, max_size=5), windows=st.integers(1, 200), seed=st.integers(0, 2**64))
def test_no_sample_is_lost_or_repeated_when_a_run_goes_on_with_other_numbers(stages, windows, seed):
    """Each stage is a run with another n, micro-batch and accumulation that knows only how many samples were drawn.

    Read over as many epochs as it takes, every window comes once an epoch, whatever the stages.
    """
    cursor, drawn = 0, []
    for world_size, micro_batch, accumulation, steps in stages:
        for _ in range(steps):
            step = dealt_step(cursor, world_size, micro_batch, accumulation)
            cursor += world_size * micro_batch * accumulation
            drawn += sorted(step)
    assert drawn == list(range(cursor))
    read = windows_at(drawn, windows=windows, seed=seed).tolist()
    for epoch in range(0, cursor, windows):
        inside = read[epoch : epoch + windows]
        assert len(set(inside)) == len(inside)
        assert len(inside) < windows or sorted(inside) == list(range(windows))


@settings(deadline=None)
@given(windows=st.integers(1, 300), epoch=st.integers(0, 5), seed=st.integers(0, 2**64))
def test_an_epoch_reads_every_window_once(windows, epoch, seed):
    samples = range(epoch * windows, (epoch + 1) * windows)
    assert sorted(windows_at(samples, windows=windows, seed=seed)) == list(range(windows))


@settings(deadline=None)
@given(first=st.integers(0, 10**7), windows=st.integers(1, 2**40), cut=st.integers(1, 19))
def test_a_sample_reads_the_same_window_in_whatever_company(first, windows, cut):
    together = windows_at(range(first, first + 20), windows=windows, seed=3)
    apart = [
        windows_at(part, windows=windows, seed=3)
        for part in (range(first, first + cut), range(first + cut, first + 20))
    ]
    assert together.tolist() == np.concatenate(apart).tolist()
    assert together.max() < windows


def test_the_order_depends_on_the_seed_and_the_epoch_and_is_no_run_of_neighbours():
    def order(seed, epoch):
        return windows_at(range(epoch * 1000, (epoch + 1) * 1000), windows=1000, seed=seed).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sum(abs(a - b) == 1 for a, b in zip(order(0, 0), order(0, 0)[1:], strict=False)) < 10


def test_every_window_is_as_likely_as_any_other_in_every_place():
    """First halves of many short epochs: a biased network would favour some windows there."""
    windows, epochs = 16, 4000
    first = windows_at(range(windows * epochs), windows=windows, seed=1).reshape(epochs, windows)[:, 0]
    counts = np.bincount(first, minlength=windows)
    assert abs(counts - epochs / windows).max() < 5 * (epochs / windows) ** 0.5


def test_the_order_is_what_it_was():
    """A run goes on after an upgrade only while these numbers stay."""
    assert windows_at(range(8), windows=10**9, seed=7).tolist() == EXPECTED_WINDOWS
    assert draw(word(1), word(2)).tolist() == [EXPECTED_DRAW]


def test_windows_cover_all_that_can_be_predicted():
    assert [windows_of(size, 4) for size in (0, 1, 2, 5, 6, 9, 10, 11)] == [0, 0, 1, 1, 2, 2, 3, 3]


EXPECTED_WINDOWS = [635270788, 855752576, 341677788, 285392384, 940004075, 36438648, 460973060, 989493151]
EXPECTED_DRAW = 13608149317741381227
