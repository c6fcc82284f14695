"""Bytes that leave each node, from the meters of its ranks, against the formulas of `mics.traffic` (trap 5).

A flat ring on the permuted order of a hierarchical grid crosses nodes at every hop, so these also show that flat
strategies keep the natural order.
"""

import pytest
import torch
import torch.distributed as dist
from mics import traffic
from mics.sharding import apply, boundary, connect
from mics.strategies import rank_grid
from torch import nn

pytestmark = pytest.mark.distributed

RANKS, MICRO_STEPS, BLOCKS, WIDTH = 8, 3, 2, 16
BLOCK, ROOT = WIDTH * WIDTH, 2 * WIDTH * WIDTH  # parameters
# (strategy, p, k, gather dtype, reshard)
CELLS = [
    ("ddp", 1, 2, None, True),
    ("mics-flat", 2, 2, None, True),
    ("mics-flat", 2, 4, torch.bfloat16, False),
    ("mics-flat", 4, 2, None, True),
    ("mics-flat", 4, 2, None, False),
    ("mics-flat", 4, 2, None, 2),
    ("mics-flat", 8, 2, None, True),
    ("zero3", 8, 2, torch.bfloat16, True),
    ("zero3", 8, 2, torch.bfloat16, 2),
    ("zero3", 8, 4, None, True),
    ("zero3", 8, 4, None, False),
    ("zero2", 8, 2, None, "step"),
    ("zero2", 8, 4, torch.bfloat16, "step"),
    ("mics", 2, 2, None, True),
    ("mics", 2, 2, None, 2),
    ("mics", 4, 1, None, True),
    ("mics", 4, 2, torch.bfloat16, True),
    ("mics", 4, 2, torch.bfloat16, 2),
    ("mics", 4, 2, None, False),
    ("mics", 8, 2, None, True),
    ("mics", 8, 4, None, True),
    ("mics", 8, 4, None, 4),
    ("mics", 8, 4, None, 2),
    ("mics", 8, 4, None, "step"),
]


class Stack(nn.Module):
    """Every dimension is a multiple of 8, so there is no padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)[..., :WIDTH].tanh()
        for block in self.blocks:
            x = block(x).tanh()
        return x * 2


def grid_of(strategy, p, k):
    return rank_grid(strategy, world_size=RANKS, devices_per_node=k, partition=p)


def one_step(cells):
    """By cell: this rank's counts of one optimizer step, and the bytes of gathers and hop 1 that really went to another
    node."""
    sent_bytes, isend = [], dist.isend
    rank, results = dist.get_rank(), {}

    def watched(tensor, *, group, group_dst, **tag):
        sent_bytes.append((dist.get_global_rank(group, group_dst), tensor.numel() * tensor.element_size()))
        return isend(tensor, group=group, group_dst=group_dst, **tag)

    dist.isend = watched
    for cell in cells:
        strategy, p, k, gather_dtype, reshard = cell
        connection = connect(grid_of(strategy, p, k))
        torch.manual_seed(0)
        model = Stack()
        reduce_dtype = torch.float32 if gather_dtype else None
        dtypes = {"gather_dtype": gather_dtype, "reduce_dtype": reduce_dtype}
        apply(model, connection, blocks=model.blocks, reshard=reshard, **dtypes)
        for _ in range(2):  # of a run, the first step is not special
            sent_bytes.clear()
            connection.meter.take()
            for micro in range(MICRO_STEPS):
                with boundary(model, last=micro == MICRO_STEPS - 1):
                    model(torch.ones(2, WIDTH)).sum().backward()
        results[cell] = connection.meter.take(), sum(size for peer, size in sent_bytes if peer // k != rank // k)
    return results


@pytest.fixture(scope="module")
def counted(run_ranks):
    return run_ranks(one_step, cells=CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-p{cell[1]}-k{cell[2]}-{cell[4]}")
def test_bytes_per_node(cell, counted):
    strategy, p, k, gather_dtype, reshard = cell
    gathered_bytes = 2 if gather_dtype else 4
    predicted = traffic.per_step(
        grid_of(strategy, p, k),
        block_bytes=BLOCKS * BLOCK * gathered_bytes,
        root_bytes=ROOT * gathered_bytes,
        block_gradient_bytes=BLOCKS * BLOCK * 4,
        root_gradient_bytes=ROOT * 4,
        micro_steps=MICRO_STEPS,
        reshard=reshard,
    )
    for node in range(RANKS // k):
        ranks = [counted[rank][cell] for rank in range(node * k, (node + 1) * k)]
        by_stage = {stage: sum(counts[stage].traffic_bytes for counts, _ in ranks) for stage in ranks[0][0]}
        assert by_stage["gather_inside"] == by_stage["hop1_inside"] == 0
        assert by_stage["gather_across"] == predicted.gather
        assert by_stage["hop1_across"] == predicted.reduce_scatter
        assert by_stage["gather_across"] + by_stage["hop1_across"] == sum(sent for _, sent in ranks)  # really sent
        assert by_stage["hop2"] == predicted.hop2
