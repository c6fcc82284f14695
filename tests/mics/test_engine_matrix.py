"""Every strategy x precision x checkpointing x compilation x kind of model against one process of the same precision.

The fast cells are pairwise: every value of one column meets every value of each other one at least once; only compiled
cells are few, on the plain model and three strategies. The slow ones are the whole product, compiled
blocks again on the plain model only: `sometimes` and `frozen` would only compile more versions of the same code.

Tolerances. fp64 is exact up to the order of the additions. In bf16 and fp16 both sides round each activation alike and
add the same rounded gradients in fp32, in another order; one weight that then rounds to the other neighbour changes
activations by 2^-8 (bf16) or 2^-11 (fp16). Weights are about 0.4 and move by about 0.1 in these steps.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from mics.recompute import prepare_blocks
from mics.sharding import apply, boundary, clip, connect
from mics.strategies import rank_grid
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.distributed

RANKS, DEVICES_PER_NODE, STEPS, MICRO_STEPS, BLOCKS = 4, 2, 2, 2, 2
WIDTH, HEADS, MAX_NORM, LOSS_SCALE = 6, 2, 0.2, 1024.0
# (strategy, p, reshard)
ENGINES = [
    ("mics", 4, True),  # hierarchical
    ("mics", 4, 2),  # hierarchical, and a copy for the backward pass on each node
    ("mics", 2, False),
    ("mics-flat", 4, 2),
    ("mics-flat", 2, True),
    ("zero3", "auto", True),
    ("zero2", "auto", "step"),
    ("ddp", "auto", True),
]
PRECISIONS = {"fp64": 1e-10, "bf16": 2e-3, "fp16": 2e-4}
CHECKPOINTING = ["none", "selective", "full"]
MODELS = ["plain", "frozen", "sometimes"]
COMPILE = ["none", "aot_eager"]


COMPILED = (0, 1, 5)  # of ENGINES, in the fast cells


def pairwise():
    """3 values each of precision, checkpointing and model by a Latin square over the engines."""
    for e, p in itertools.product(range(len(ENGINES)), range(3)):
        model = MODELS[(e + 2 * p) % 3]
        compiled = COMPILE[e in COMPILED and model == "plain"]
        yield ENGINES[e], list(PRECISIONS)[p], CHECKPOINTING[(e + p) % 3], compiled, model


def whole_product():
    """Cells with common compiled code together."""
    every = itertools.product(COMPILE, PRECISIONS, CHECKPOINTING, MODELS, ENGINES)
    return [(e, p, c, k, m) for k, p, c, m, e in every if k == "none" or m == "plain"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.side, self.down = nn.Linear(WIDTH, 11), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, use_side):
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        up = functional.gelu(self.up(x))
        return x + self.down(up * self.side(x) if use_side else up)


class Tiny(nn.Module):
    """Widths that 4 does not divide, so shards are uneven and some are empty; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(17, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens, use_side):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, use_side)
        return functional.linear(self.norm(x), self.embedding.weight)


def tiny(precision, kind):
    torch.manual_seed(0)
    model = Tiny().to(torch.float64 if precision == "fp64" else torch.float32)
    if kind == "frozen":
        model.blocks[1].requires_grad_(False)  # a whole block
        model.blocks[0].up.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
    return model


def computes_in(precision):
    return {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def loss_of(model, precision, kind, step, micro, rank):
    """Of one rank's micro-step, scaled for fp16. `model` takes (tokens, use_side)."""
    random = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens, targets = torch.randint(17, (2, 2, 5), generator=random)
    use_side = kind != "sometimes" or (micro + rank) % 2 == 1
    logits = model(tokens, use_side).flatten(0, 1)
    loss = functional.cross_entropy(logits if precision == "fp64" else logits.float(), targets.flatten())
    return loss / (MICRO_STEPS * RANKS) * (LOSS_SCALE if precision == "fp16" else 1)


def optimizer_of(model):
    """It shows a wrong factor on the gradients; Adam does not."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def reference(precision, kind):
    """Parameters and norms of one process, which computes in a rounded copy of the weights."""
    model, norms = tiny(precision, kind), []
    optimizer = optimizer_of(model)

    def rounded(*args):
        weights = {name: value.to(computes_in(precision)) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, weights, args)

    for step in range(STEPS):
        for micro, rank in itertools.product(range(MICRO_STEPS), range(RANKS)):
            loss_of(rounded, precision, kind, step, micro, rank).backward()
        for parameter in model.parameters():
            if precision == "fp16" and parameter.grad is not None:
                parameter.grad /= LOSS_SCALE
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norms


def train_cells(cells):
    """By cell: parameters, norms, and calls by stage of the last step. Parameters on rank 0 only."""
    results, connections, compiled = {}, {}, None
    for cell in cells:
        (strategy, p, reshard), precision, checkpointing, compile_, kind = cell
        grid = rank_grid(strategy, world_size=RANKS, devices_per_node=DEVICES_PER_NODE, partition=p)
        connection = (
            connections.setdefault(grid, None) or connections.update({grid: connect(grid)}) or connections[grid]
        )
        if compile_ != "none" and compiled != (precision, checkpointing):
            torch._dynamo.reset()  # it keeps a few versions of each function only
            compiled = precision, checkpointing
        model = tiny(precision, kind)
        prepare_blocks(model.blocks, checkpointing=checkpointing, compile=compile_)
        half = {} if precision == "fp64" else {"gather_dtype": computes_in(precision), "reduce_dtype": torch.float32}
        apply(model, connection, blocks=model.blocks, reshard=reshard, **half)
        optimizer, norms = optimizer_of(model), []
        scale = torch.tensor(LOSS_SCALE) if precision == "fp16" else None
        for step in range(STEPS):
            connection.meter.take()
            for micro in range(MICRO_STEPS):
                with boundary(model, last=micro == MICRO_STEPS - 1):
                    loss_of(model, precision, kind, step, micro, dist.get_rank()).backward()
            norms.append(clip(model, MAX_NORM, scale=scale).item())
            optimizer.step()
            optimizer.zero_grad()
        calls = {stage: count.calls for stage, count in connection.meter.take().items()}
        parameters = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
        results[cell] = (parameters if dist.get_rank() == 0 else {}, norms, calls)
    return results


FAST = sorted(pairwise(), key=lambda cell: (cell[3], cell[1]))  # cells with common compiled code together


@pytest.fixture(scope="module")
def expected():
    return {(p, m): reference(p, m) for p in PRECISIONS for m in MODELS}


@pytest.fixture(scope="module")
def trained(run_ranks):
    return run_ranks(train_cells, cells=FAST, ranks=RANKS, deadline_s=240)


def gathers(grid, reshard):
    """Calls of a step by stage: recomputation adds none."""
    blocks_twice = MICRO_STEPS * (2 * BLOCKS + 1)
    once = MICRO_STEPS * (BLOCKS + 1)
    whole = {True: blocks_twice, False: once, "step": BLOCKS + 1}.get(reshard, once)
    shared = MICRO_STEPS * BLOCKS if not isinstance(reshard, bool | str) else 0
    crosses = grid.partition_size > DEVICES_PER_NODE
    inside = whole if grid.hierarchical or (not crosses and grid.partition_size > 1) else 0
    return {"gather_across": whole if crosses else 0, "gather_inside": inside + shared}


def check(cell, trained, expected):
    (strategy, p, reshard), precision, _, _, kind = cell
    parameters, norms = expected[precision, kind]
    tolerance = PRECISIONS[precision]
    assert max(norms) > MAX_NORM  # clipping took part
    grid = rank_grid(strategy, world_size=RANKS, devices_per_node=DEVICES_PER_NODE, partition=p)
    for rank in range(RANKS):
        mine, my_norms, calls = trained[rank][cell]
        assert my_norms == pytest.approx(norms, rel=tolerance)
        assert calls == {**calls, **gathers(grid, reshard)}
        for name, value in mine.items():
            torch.testing.assert_close(
                value, parameters[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def name_of(cell):
    (strategy, p, reshard), *rest = cell
    return f"{strategy}-{p}-{reshard}-" + "-".join(rest)


@pytest.mark.parametrize("cell", FAST, ids=name_of)
def test_steps_equal_one_process(cell, trained, expected):
    check(cell, trained, expected)


def test_the_fast_cells_are_pairwise():
    columns = [ENGINES, list(PRECISIONS), CHECKPOINTING, COMPILE, MODELS]
    for i, j in itertools.combinations(range(len(columns)), 2):
        missing = set(itertools.product(columns[i], columns[j])) - {(cell[i], cell[j]) for cell in FAST}
        assert not [pair for pair in missing if "aot_eager" not in pair or set(pair) & {*PRECISIONS, *CHECKPOINTING}]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_product(run_ranks, expected):
    cells = whole_product()
    trained = run_ranks(train_cells, cells=cells, ranks=RANKS, deadline_s=540)
    for cell in cells:
        check(cell, trained, expected)
