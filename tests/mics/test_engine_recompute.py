"""What a block computes twice, and that nothing else about it changes. (Numbers: test_engine_matrix.py.)"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from mics.errors import RunRefusedError
from mics.recompute import check_compiler, prepare_blocks
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x, *, causal=True):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        return x + self.dropout(functional.gelu(self.out(attended)))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def blocks_of(count=2, dropout=0.0, **options):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(dropout) for _ in range(count)))
    prepare_blocks(blocks, **options)
    return blocks


def loss_of(blocks):
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(2)
    return blocks(x).square().sum()


@pytest.mark.parametrize(
    ("checkpointing", "again"),
    [
        ("none", {"addmm": 0, "gelu": 0, "_scaled_dot_product_flash_attention_for_cpu": 0}),
        ("selective", {"addmm": 0, "gelu": 2, "_scaled_dot_product_flash_attention_for_cpu": 0}),
        # the last operations of a block are not needed again
        ("full", {"addmm": 4, "gelu": 2, "_scaled_dot_product_flash_attention_for_cpu": 2}),
    ],
)
def test_what_is_computed_again(checkpointing, again):
    loss = loss_of(blocks_of(dropout=0.1, checkpointing=checkpointing))
    with Counting() as backward:
        loss.backward()
    assert {name: backward.calls[name] for name in again} == again


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_dropout_hides_the_same_elements_both_times(checkpointing):
    plain, recomputing = blocks_of(dropout=0.5), blocks_of(dropout=0.5, checkpointing=checkpointing)
    for blocks in (plain, recomputing):
        loss_of(blocks).backward()
    for mine, other in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_names_and_keyword_arguments_stay():
    blocks = blocks_of(checkpointing="selective", compile="aot_eager")
    assert list(blocks.state_dict()) == list(blocks_of().state_dict())
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(blocks[0](x, causal=False), blocks_of()[0](x, causal=False))


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_equal_blocks_share_compiled_code(checkpointing):
    """One version for an input that needs no gradient and one for the rest: torch keeps 8 versions of a function, and
    the blocks after that would run uncompiled without a word."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss_of(blocks_of(12, checkpointing=checkpointing, compile="aot_eager")).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_missing_compiler_is_said_before_the_first_step():
    check_compiler("aot_eager", {"PATH": "/nowhere"})
    check_compiler("inductor", {"PATH": str(Path(sys.executable).parent), "CXX": Path(sys.executable).name})
    with pytest.raises(RunRefusedError, match=r"train.compile: inductor needs a C\+\+ compiler .* no g\+\+"):
        check_compiler("inductor", {"PATH": "/nowhere"})


def test_nothing_asked_nothing_changed():
    assert "forward" not in vars(blocks_of()[0])
