"""The A/B of the collectives before a run."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mics.topology import RankGrid
from mics.trial import REPEATS, Trial, hierarchical_pays

RANKS = 4
GRID = RankGrid(RANKS, 2, 4, hierarchical=True)


def try_twice():
    """A trial without time, and one in which the second stage of rank 2's gather is slow; then a group still works."""
    flat, device = replace(GRID, hierarchical=False), torch.device("cpu")
    short = hierarchical_pays(GRID, flat, block_bytes=1001, seconds=0.0, device=device)
    isend, slow = dist.isend, dist.get_rank() == 2

    def late(*args, **kwargs):
        if slow and kwargs["group"].size() == 2:
            time.sleep(0.02)
        return isend(*args, **kwargs)

    dist.isend = late
    started = time.perf_counter()
    longer = hierarchical_pays(GRID, flat, block_bytes=1000, seconds=0.3, device=device)
    taken = time.perf_counter() - started
    dist.all_reduce(torch.ones(1))
    return short, longer, taken


@pytest.mark.distributed
def test_all_ranks_decide_alike_and_in_time(run_ranks):
    outcomes = run_ranks(try_twice, ranks=RANKS)
    assert len({(short, longer) for short, longer, _ in outcomes}) == 1
    short, longer, _ = outcomes[0]
    assert short.repeats == 1
    assert min(short.flat_seconds, short.hierarchical_seconds) > 0
    assert 1 <= longer.repeats <= REPEATS
    assert longer.hierarchical_seconds > 0.03  # two gathers of two ranks each
    assert all(taken < 10 for *_, taken in outcomes)


def test_the_faster_form_wins():
    assert Trial(flat_seconds=2.0, hierarchical_seconds=1.0, repeats=3).pays
    assert not Trial(flat_seconds=1.0, hierarchical_seconds=1.0, repeats=3).pays


@pytest.mark.parametrize("flat", [GRID, RankGrid(RANKS, 2, 2), RankGrid(8, 2, 4)])
def test_grids_that_differ_in_more_are_refused(flat):
    with pytest.raises(ValueError, match="with and without hierarchy"):
        hierarchical_pays(GRID, flat, block_bytes=1, seconds=1, device=torch.device("cpu"))
