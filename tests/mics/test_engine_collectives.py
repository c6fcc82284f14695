"""The collectives against torch's own, and the meter's arithmetic."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from mics.collectives import (
    STAGES,
    Meter,
    reduce_scatter,
    ring_reduce_scatter,
)
from mics.sharding import collectives_of, connect
from mics.topology import RankGrid

RANKS = 8
SIZES = (0, 1, 7, 64, 1001)  # elements per rank
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def rank_values(elements, dtype):
    """Small integers that differ by rank and position: their sums are exact in every dtype and every order."""
    return ((torch.arange(elements) * 3 + dist.get_rank()) % 7 - 3).to(dtype)


def compare_all():
    """By (group kind, collective, size, dtype): did it give the same bits as torch's own?"""
    flat = connect(RankGrid(RANKS, 2, 4))
    column = connect(RankGrid(RANKS, 2, 4, hierarchical=True))
    whole = connect(RankGrid(RANKS, 4, 8, hierarchical=True))
    lonely = connect(RankGrid(RANKS, 1, 4, hierarchical=True))  # one device per node: nothing to do inside
    same = {}
    for name, connection in {"flat": flat, "2 x 2": column, "2 x 4": whole, "4 x 1": lonely}.items():
        shard = connection.shard
        gather, scatter = collectives_of(connection)
        for elements in SIZES:
            for dtype in DTYPES:
                expected, output = (
                    rank_values(elements * shard.size(), dtype),
                    rank_values(elements * shard.size(), dtype),
                )
                mine = output.narrow(0, shard.rank() * elements, elements)  # a view into the output, as FSDP2 does
                dist.all_gather_single(expected, mine.clone(), group=shard)
                gather(output, mine, shard).wait()
                same[name, "gather", elements, dtype] = torch.equal(output, expected)

                full = rank_values(elements * shard.size(), dtype)
                expected, output = full.new_empty(elements), full.new_empty(elements)
                dist.reduce_scatter_single(expected, full.clone(), group=shard)
                scatter(output, full, shard, dist.ReduceOp.SUM)
                same[name, "reduce-scatter", elements, dtype] = torch.equal(output, expected)
    return same


def ring_in_place():
    """Output that is a chunk of the input, a group of one, a group in reverse order, and what is refused."""
    backward = dist.new_group(list(reversed(range(RANKS))), sort_ranks=False)
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    full = torch.full((RANKS, 3), float(dist.get_rank()))
    chunk = full[backward.rank()]
    ring_reduce_scatter(chunk, full, backward)
    single, copied = torch.arange(3.0), torch.zeros(3)
    ring_reduce_scatter(copied, single, alone)
    try:
        reduce_scatter(copied, single, alone, dist.ReduceOp.MAX)
    except ValueError as error:
        refused = str(error)
    return {"chunk": chunk.tolist(), "copied": copied.tolist(), "refused": refused}


def small_group_gather():
    """A hierarchical gather that is called with another group than the partition group gathers flat."""
    connection = connect(RankGrid(RANKS, 2, 8, hierarchical=True))
    gather, _ = collectives_of(connection)
    output = torch.zeros(2)
    gather(output, torch.full((1,), float(dist.get_rank())), connection.groups.inside).wait()
    counts = connection.meter.take()
    return output.tolist(), {stage: count.calls for stage, count in counts.items()}


def everything():
    return {"same": compare_all(), "ring": ring_in_place(), "small": small_group_gather()}


@pytest.fixture(scope="module")
def outcome(run_ranks):
    return run_ranks(everything)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["flat", "2 x 2", "2 x 4", "4 x 1"])
@pytest.mark.parametrize("collective", ["gather", "reduce-scatter"])
def test_equals_torch(name, collective, outcome):
    for rank in range(RANKS):
        same = {key: equal for key, equal in outcome[rank]["same"].items() if key[:2] == (name, collective)}
        assert len(same) == len(SIZES) * len(DTYPES)
        assert all(same.values()), [key for key, equal in same.items() if not equal]


@pytest.mark.distributed
def test_ring_reduce_scatter_in_place_and_alone(outcome):
    total = float(sum(range(RANKS)))
    for rank in range(RANKS):
        ring = outcome[rank]["ring"]
        assert ring["chunk"] == [total] * 3
        assert ring["copied"] == [0.0, 1.0, 2.0]
        assert "sums gradients" in ring["refused"]


@pytest.mark.distributed
def test_other_group_is_gathered_flat(outcome):
    for rank in range(RANKS):
        output, calls = outcome[rank]["small"]
        assert output == [float(rank // 2 * 2), float(rank // 2 * 2 + 1)]
        assert calls == dict.fromkeys(STAGES, 0) | {"gather_inside": 1}


class Group:
    """The part of a process group that the meter reads."""

    def __init__(self, ranks, me):
        self.ranks, self.me = ranks, me

    def rank(self):
        return self.ranks.index(self.me)


@pytest.fixture
def meter(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group.ranks))
    return Meter(devices_per_node=2)


def test_meter_counts_by_the_order_of_the_group(meter):
    """Rank 0 sends inside its node in natural order, to the other node in the permuted one."""
    for ranks, sent in (((0, 1, 2, 3), 0), ((0, 2, 1, 3), 750)):
        with meter.ring_pass("gather", Group(ranks, 0), 1000):
            pass
        assert meter.take()["gather_across"].traffic_bytes == sent
    with meter.ring_pass("hop1", Group((0, 1), 1), 1000):
        pass
    meter.mark()
    meter.hop2(Group((0, 2), 2), 1000)
    counts = meter.take()
    assert (counts["hop1_inside"].calls, counts["hop1_inside"].traffic_bytes) == (1, 0)
    assert (counts["hop2"].calls, counts["hop2"].traffic_bytes) == (1, 1000)
    assert counts["hop2"].seconds > 0


def test_hop2_does_not_count_the_wait_for_the_one_before(meter, monkeypatch):
    """On CUDA its start is marked on the stream of hop 1, which does not wait for the hop 2 of the block before."""
    instants = iter([0.0, 5.0, 1.0, 9.0])  # mark, end, mark, end
    monkeypatch.setattr(meter, "_now", lambda: next(instants))
    meter._hop2_end = -1.0
    meter._on_cuda = True
    for _ in range(2):
        meter.mark()
        meter.hop2(Group((0, 2), 2), 1000)
    assert meter.take()["hop2"].seconds == 5.0 + 4.0


def test_take_starts_from_zero_and_names_every_stage(meter):
    with meter.ring_pass("gather", Group((0, 2), 0), 8):
        pass
    assert meter.take()["gather_across"].calls == 1
    counts = meter.take()
    assert tuple(counts) == STAGES
    assert all(count.calls == count.traffic_bytes == count.seconds == 0 for count in counts.values())


def test_meter_does_not_grow_when_nobody_takes(meter, monkeypatch):
    monkeypatch.setattr("mics.collectives._OPEN_INTERVALS", 4)
    for _ in range(100):
        with meter.ring_pass("gather", Group((0, 2), 0), 8):
            pass
    assert len(meter._open) == 4
    assert meter.take()["gather_across"].calls == 100


def test_another_torch_is_refused_with_a_clear_error():
    script = "import torch; torch.__version__ = '2.14.0+cpu'; import mics.collectives"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "ImportError: mics needs torch 2.13, this is torch 2.14.0+cpu; install torch==2.13.0" in ended.stderr
