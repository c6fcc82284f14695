"""Both stages at once: the same results as one stage, whatever the shape of the grid and the size of the pieces."""

import threading

import pytest
import torch
import torch.distributed as dist
from mics import relay
from mics.relay import relay_gather, relay_reduce_scatter
from mics.sharding import connect
from mics.topology import RankGrid

RANKS = 6


def both(connection, shard_size, *, in_place, dtype=torch.float64):
    """A gather and a reduce-scatter at the same time on the same groups; what differs from what must come out."""
    size, place = connection.shard.size(), connection.shard.rank()
    groups = connection.groups
    expected = torch.arange(size * shard_size, dtype=dtype)
    whole = torch.full_like(expected, -1)
    shard = expected.chunk(size)[place].clone()
    if in_place:
        whole.chunk(size)[place].copy_(shard)
        shard = whole.chunk(size)[place]
    summands = expected * (place + 1)
    total = summands.chunk(size)[place] if in_place else torch.empty(shard_size, dtype=dtype)
    gather = threading.Thread(target=relay_gather, args=(whole, shard, groups.across, groups.inside))
    gather.start()
    relay_reduce_scatter(total, summands, groups.across, groups.inside)
    gather.join()
    wanted = expected.chunk(size)[place] * (size * (size + 1) // 2)
    return torch.equal(whole, expected) and torch.equal(total, wanted)


def relay_everything():
    outcomes = {}
    for devices in (2, 3):  # 3 nodes of two, 2 of three
        connection = connect(RankGrid(RANKS, devices, RANKS, hierarchical=True))
        for piece_bytes in (8, 24, 1000):
            relay.PIECE_BYTES = piece_bytes
            for shard_size in (1, 7, 10):
                for in_place in (True, False):
                    case = (devices, piece_bytes, shard_size, in_place)
                    outcomes[case] = both(connection, shard_size, in_place=in_place)
        dist.barrier()
    return outcomes


@pytest.mark.distributed
def test_every_rank_gets_its_part(run_ranks):
    for outcomes in run_ranks(relay_everything, ranks=RANKS):
        assert [case for case, right in outcomes.items() if not right] == []
        assert len(outcomes) == 36


def test_pieces_are_as_small_as_they_must_be():
    assert relay._pieces(torch.empty(relay.PIECE_BYTES // 4)) == 1
    assert relay._pieces(torch.empty(relay.PIECE_BYTES // 4 + 1)) == 2
    assert relay._pieces(torch.empty(0)) == 1
