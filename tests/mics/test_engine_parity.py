"""Training on 8 ranks equals training in one process, for every shape of the rank grid; and what it takes to do so."""

import pytest
import torch
import torch.distributed as dist
from mics.sharding import apply, boundary, clip, connect
from mics.topology import RankGrid
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.distributed

RANKS, STEPS, MICRO_STEPS, BLOCKS = 8, 3, 3, 2
MAX_NORM, IGNORED, SEQUENCE = 0.5, -100, 5
# (p, k, hierarchical)
CELLS = [(1, 2, False), (2, 2, False), (2, 4, False), (4, 2, False), (4, 2, True)]
CELLS += [(8, 2, False), (8, 2, True), (8, 4, False), (8, 4, True)]


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Widths that 8 does not divide, so shards are uneven and some are empty; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 6)
        self.blocks = nn.ModuleList(Block(6, 11) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


def tiny():
    torch.manual_seed(0)
    return Tiny().double()


def batch_of(step, micro, rank):
    """Tokens and targets [2, SEQUENCE]; from 0 to all of the targets count, depending on the rank."""
    random = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens, targets = torch.randint(17, (2, 2, SEQUENCE), generator=random)
    targets[:, (rank + micro) % (SEQUENCE + 1) :] = IGNORED
    return tokens, targets


def tokens_of(step):
    batches = (batch_of(step, micro, rank) for micro in range(MICRO_STEPS) for rank in range(RANKS))
    return sum(int((targets != IGNORED).sum()) for _, targets in batches)


def summed_loss(model, tokens, targets):
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def reference():
    model, norms = tiny(), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for micro in range(MICRO_STEPS):
            for rank in range(RANKS):
                (summed_loss(model, *batch_of(step, micro, rank)) / tokens_of(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def train_cells(cells):
    """On each rank, by cell: parameters, norms, and by micro-step the all-reduces and the meter's counts."""
    all_reduces, all_reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        all_reduces.append(kwargs.get("group"))
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    results = {}
    for p, k, hierarchical in cells:
        connection = connect(RankGrid(RANKS, k, p, hierarchical=hierarchical))
        model = tiny()
        apply(model, connection, blocks=model.blocks)
        optimizer = optimizer_of(model)
        norms, micro_steps = [], []
        for step in range(STEPS):
            for micro in range(MICRO_STEPS):
                before = len(all_reduces)
                with boundary(model, last=micro == MICRO_STEPS - 1):
                    (summed_loss(model, *batch_of(step, micro, dist.get_rank())) / tokens_of(step)).backward()
                connection.settle()
                micro_steps.append((len(all_reduces) - before, connection.meter.take()))
            norm = clip(model, MAX_NORM)
            assert type(norm) is torch.Tensor
            norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        parameters = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
        results[p, k, hierarchical] = (parameters, norms, micro_steps)
    return results


@pytest.fixture(scope="module")
def trained(run_ranks):
    return run_ranks(train_cells, cells=CELLS)


@pytest.fixture(scope="module")
def expected():
    return reference()


@pytest.mark.parametrize("cell", CELLS)
def test_three_steps_equal_one_process(cell, trained, expected):
    parameters, norms = expected
    assert max(norms) > MAX_NORM  # clipping took part
    for rank in range(RANKS):
        mine, my_norms, _ = trained[rank][cell]
        assert my_norms == pytest.approx(norms, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-10, msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("cell", CELLS)
def test_collectives_per_micro_step(cell, trained):
    """Hop 2 only at the boundary, one per block and one for the root; gathers of blocks twice, of the root once."""
    p, k, hierarchical = cell
    passes = {"gather": 2 * BLOCKS + 1, "hop1": BLOCKS + 1}
    for rank in range(RANKS):
        for index, (all_reduces, counts) in enumerate(trained[rank][cell][2]):
            at_boundary = index % MICRO_STEPS == MICRO_STEPS - 1
            assert all_reduces == counts["hop2"].calls == (BLOCKS + 1 if at_boundary and p < RANKS else 0)
            for kind, calls in passes.items():
                assert counts[f"{kind}_across"].calls == (calls if p > k else 0)
                assert counts[f"{kind}_inside"].calls == (calls if 1 < p <= k or hierarchical else 0)


def test_time_is_counted_where_calls_are(trained):
    for _, counts in trained[0][4, 2, True][2]:
        for count in counts.values():
            assert (count.seconds > 0) == (count.calls > 0)
