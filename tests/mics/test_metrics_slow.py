"""Who is slower than the rest: from constructed steps, and from a real slowed rank."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from mics.collectives import STAGES, StageCount
from mics.metrics import RankStep, exchange, rank_step
from mics.sharding import apply, boundary, connect
from mics.slow import PATIENCE, REPEAT, Patience, Slow, in_words, slow_ranks, stage_groups
from mics.timer import StepTimer
from mics.topology import RankGrid
from torch import nn

SIXTEEN = RankGrid(16, 4, 4)  # four partition groups, each in a node
SPANNING = RankGrid(16, 2, 4, hierarchical=True)  # four partition groups of two nodes


def rank_of(forward=1.0, data=0.1, optimizer=0.2, **stages):
    counts = {stage: StageCount(stage in stages, 0, stages.get(stage, 0.0)) for stage in STAGES}
    return RankStep(0.0, False, 0, 0, data, 3 * forward, forward, optimizer, counts)


def found(ranks, grid=SIXTEEN, step_seconds=4.0):
    return slow_ranks(ranks, grid, step_seconds=step_seconds)


@pytest.mark.parametrize("part", ["forward", "data", "optimizer"])
def test_a_rank_with_more_work_is_slow_and_those_that_wait_for_it_are_not(part):
    base = {"forward": 1.0, "data": 0.5, "optimizer": 0.5}
    ranks = [rank_of(**base, hop2=1.5) for _ in range(16)]
    ranks[13] = rank_of(**(base | {part: 2.1 * base[part]}), hop2=0.1)  # arrives last, waits for nobody
    (slow,) = found(ranks)
    assert (slow.ranks, slow.part) == ((13,), "compute" if part == "forward" else part)
    assert slow.ratio == pytest.approx(2.1)


def test_long_waits_in_a_collective_accuse_nobody():
    ranks = [rank_of(hop1_inside=0.1 if rank % 4 == 2 else 3.0, hop2=0.2) for rank in range(16)]
    assert found(ranks) == []


def test_a_group_on_a_slow_link_has_the_longest_transfer():
    """Ranks 4 to 7 are one partition group on the nodes 2 and 3; each of its pairs across nodes takes long."""
    ranks = [rank_of(hop1_across=(2.0 if rank in (4, 6) else 1.0) + 0.1 * (rank // 2 % 2)) for rank in range(16)]
    (slow,) = found(ranks, SPANNING)
    assert (set(slow.ranks), slow.part, slow.ratio) == ({4, 6}, "hop1_across", 2.0)
    names = [f"i-{rank // 2}" for rank in range(16)]
    assert in_words(slow, names) == "ranks 4 and 6, i-2 and i-3, 2.0x slower in hop 1 across"
    assert in_words(Slow((13,), "compute", 2.1), names) == "rank 13, i-6, 2.1x slower in compute"


def test_twice_of_nothing_is_no_news():
    ranks = [rank_of(data=0.001) for _ in range(16)]
    ranks[3] = rank_of(data=0.02)
    assert found(ranks) == []
    assert [slow.ranks for slow in found(ranks, step_seconds=0.1)] == [(3,)]


def test_one_of_two_can_be_slow():
    (slow,) = found([rank_of(1.0), rank_of(3.0)], RankGrid(2, 1, 1))
    assert (slow.ranks, slow.ratio) == ((1,), 3.0)


@given(st.lists(st.floats(0.9, 1.1), min_size=16, max_size=16), st.floats(0.01, 100))
def test_small_differences_are_never_slow_at_any_scale(shares, scale):
    assert found([rank_of(s * scale, s * scale, s * scale) for s in shares], step_seconds=4 * scale) == []


@pytest.mark.parametrize("grid", [SIXTEEN, SPANNING, RankGrid(16, 2, 4), RankGrid(8, 2, 8), RankGrid(8, 4, 1)])
def test_the_groups_of_a_stage_hold_every_rank_once(grid):
    for stage in STAGES:
        ranks = sorted(rank for group in stage_groups(grid, stage) for rank in group)
        assert ranks == list(range(grid.world_size))


def test_a_note_is_written_when_it_lasts():
    slow, other, patience = Slow((1,), "compute", 2.0), Slow((2,), "data", 2.0), Patience()
    steps = [patience.lasting([slow] if step % 7 else [slow, other]) for step in range(1, REPEAT + PATIENCE + 2)]
    noted = [step for step, lasting in enumerate(steps, 1) if lasting]
    assert noted == [PATIENCE, REPEAT + PATIENCE]
    assert all(lasting in ([], [slow]) for lasting in steps)
    assert patience.lasting([]) == patience.lasting([slow]) == []


class Slowed(nn.Linear):
    """Takes its time on one rank."""

    def forward(self, input):
        time.sleep(0.03 if dist.get_rank() == 2 else 0.01)
        return super().forward(input)


def slowed():
    grid, device = RankGrid(4, 2, 2), torch.device("cpu")
    connection, timer = connect(grid), StepTimer(device)
    model = nn.Sequential(*[Slowed(8, 8) for _ in range(3)])
    timer.follow(model)
    apply(model, connection, blocks=list(model))
    steps = []
    for _ in range(3):
        began = time.perf_counter()
        for micro in range(2):
            with timer.part("compute"), boundary(model, last=micro == 1):
                model(torch.ones(2, 8)).sum().backward()
        seconds = time.perf_counter() - began
        meter = connection.meter
        exposed_seconds, stages = meter.take_exposed_seconds(), meter.take()
        mine = rank_step(0.1 * dist.get_rank(), dist.get_rank() == 1, 2**40, timer.take(), stages, exposed_seconds)
        ranks = exchange(mine, device)
        steps.append((mine, ranks, slow_ranks(ranks, grid, step_seconds=seconds)))
    return steps[1:]


@pytest.mark.distributed
def test_a_real_rank_that_is_slow_is_found(run_ranks):
    for steps in zip(*run_ranks(slowed, ranks=4), strict=True):
        rows = [mine for mine, _, _ in steps]
        assert all(ranks == rows for _, ranks, _ in steps)  # the exchange: everybody's numbers, unchanged, everywhere
        _, ranks, slow = steps[0]
        by_compute = [(s.ranks, s.part) for s in slow if s.part == "compute"]
        assert by_compute[:1] == [((2,), "compute")], ranks  # the slowest first: a busy machine may slow others too
        waits = [sum(count.seconds for count in rank.stages.values()) for rank in ranks]
        assert min(waits) == waits[2]  # in the collectives it is the others that wait
