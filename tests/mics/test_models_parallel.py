"""The family over several ranks: nothing depends on the grid, and each rank reads its own rows."""

import json
import sys
from pathlib import Path

import mics
import pytest
import torch
from mics.config import TrainConfig
from mics.init import materialise
from mics.models.build import build
from mics.models.weights import check_weights, load_weights
from mics.shapes import ModelShape
from mics.topology import RankGrid
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")
SIZES = {"hidden": 12, "layers": 2, "heads": 6, "vocabulary": 37, "positions": 16}  # 4 divides no matrix's rows but one
FAMILIES = {
    "gpt": ModelShape(**SIZES),
    "bert": ModelShape(**SIZES, family="bert"),
    "llama": ModelShape(**SIZES, family="llama", kv_heads=2, ffn=31),
}
UNTIED = ModelShape(**SIZES, family="llama", tied=False)
GRIDS = {"p 2 of 4": RankGrid(4, 2, 2), "hierarchical": RankGrid(4, 2, 4, hierarchical=True)}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 48,
    "vocab_size": 37,
    "eos_token_id": 1,
}
OWN = """
import torch
from torch import nn

class Own(nn.Module):
    vocabulary = 37

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(37, 11)
        self.register_buffer("angles", torch.arange(11) / 3, persistent=False)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(11, 1, 19, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(11, 37)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.angles.sin()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    ids, targets = torch.randint(37, (2, 2, 16), generator=generator)
    targets[0, : 3 * rank] = -100
    return ids, targets


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def one_step(model, chunk, connection=None, frozen="", compiled=False, folder=None, batches=None, **dtypes):
    """Weights, loss and gradients of one micro-step over `batches` (this rank's own where it is None)."""
    built = build(TrainConfig(model=model, sequence=16, loss_chunk=chunk), torch.float64)
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if compiled:
        for block in built.blocks:
            block.compile(backend="aot_eager")
    if connection:
        mics.apply(built.model, connection, blocks=built.blocks, **dtypes)
    materialise(built.model, built.fill, seed=3, device=CPU)
    if folder:
        check_weights(built.model, folder)
        load_weights(built.model, folder)
    total = torch.zeros(())
    for ids, targets in batches or [batch_of(torch.distributed.get_rank())]:
        loss = built.summed_loss(built.model, ids, targets)
        loss.backward()
        total = total + loss.detach()
    if connection:
        torch.distributed.all_reduce(total)
    weights = {name: whole(parameter.detach()).clone() for name, parameter in built.model.named_parameters()}
    gradients = {
        name: whole(parameter.grad).clone()
        for name, parameter in built.model.named_parameters()
        if parameter.grad is not None
    }
    return total, weights, gradients


def sharded_steps(grids, cells, halves, folder):
    sys.path.insert(0, str(folder))
    found = {}
    for grid_name, grid in grids.items():
        connection = mics.connect(grid)
        for name, cell in cells.items():
            found[grid_name, name] = one_step(connection=connection, folder=folder if "read" in name else None, **cell)
        for name, dtype in halves.items():
            precision = {"gather_dtype": dtype, "reduce_dtype": torch.float32}
            found[grid_name, name] = one_step(FAMILIES["llama"], 5, connection, **precision)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with weights by transformers, and a module of one's own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("written")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    (folder / "models_of_ones_own.py").write_text(OWN)
    return folder


def test_losses_gradients_and_weights_do_not_depend_on_the_grid(run_ranks, written, monkeypatch):
    monkeypatch.syspath_prepend(str(written))
    cells = {name: {"model": shape, "chunk": 5} for name, shape in FAMILIES.items()}
    cells |= {
        "frozen": {"model": FAMILIES["gpt"], "chunk": 5, "frozen": "attention"},
        "frozen embedding": {"model": FAMILIES["bert"], "chunk": 0, "frozen": "tokens"},
        "own": {"model": "models_of_ones_own:Own", "chunk": 0},
        "read": {"model": UNTIED, "chunk": 5},
    }
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    found = run_ranks(sharded_steps, ranks=4, grids=GRIDS, cells=cells, halves=halves, folder=written, deadline_s=120)
    compare(found, cells, written)
    exact, _, gradients = found[0]["hierarchical", "llama"]
    for half in halves:
        loss, _, its_gradients = found[0]["hierarchical", half]
        assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
        for key, expected in gradients.items():
            assert (its_gradients[key] - expected).norm() < 0.05 * expected.norm(), (half, key)


@pytest.mark.slow  # every rank imports transformers and the compiler
def test_neither_do_compiled_blocks_or_a_model_of_transformers(run_ranks, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    cells = {name: {"model": shape, "chunk": 5, "compiled": True} for name, shape in FAMILIES.items()}
    cells["transformers"] = {"model": f"hf:{tmp_path}", "chunk": 0}
    settings = {"grids": GRIDS, "cells": cells, "halves": {}, "folder": tmp_path}
    compare(run_ranks(sharded_steps, ranks=4, deadline_s=240, **settings), cells, tmp_path)


def compare(found, cells, folder):
    """Every rank's results in every grid with those of one process."""
    batches = [batch_of(rank) for rank in range(4)]
    for name, cell in cells.items():
        loss, weights, gradients = one_step(**cell, batches=batches, folder=folder if name == "read" else None)
        assert len(gradients) < len(weights) if "frozen" in name else len(gradients) == len(weights)
        for of_rank in found:
            for grid in GRIDS:
                its_loss, its_weights, its_gradients = of_rank[grid, name]
                assert its_loss.item() == pytest.approx(loss.item(), rel=1e-12), (grid, name)
                assert set(its_gradients) == set(gradients), (grid, name)
                for key, expected in weights.items():
                    assert torch.equal(its_weights[key], expected), (grid, name, key)
                for key, expected in gradients.items():
                    torch.testing.assert_close(its_gradients[key], expected, rtol=0, atol=1e-10, msg=f"{name} {key}")


def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def memory_while_drawn(shape):
    """Bytes of the whole model in fp32, and the most that this rank grew by while it got a quarter of it."""
    built = build(TrainConfig(model=shape, sequence=16), torch.float32)
    mics.apply(built.model, mics.connect(RankGrid(4, 4, 4)), blocks=built.blocks)
    before, most = resident_bytes(), 0

    def fill(name, full, generator):
        nonlocal most
        built.fill(name, full, generator)
        most = max(most, resident_bytes() - before)

    materialise(built.model, fill, seed=0, device=CPU)
    return 4 * shape.parameters, most


def test_a_model_is_never_whole_on_one_device(run_ranks):
    shape = ModelShape(hidden=512, layers=24, heads=8, positions=16)
    largest_bytes = 4 * 4 * 512 * 512
    for whole_bytes, most_bytes in run_ranks(memory_while_drawn, ranks=4, shape=shape):
        assert whole_bytes / 5 < most_bytes < whole_bytes / 4 + 8 * largest_bytes
        assert 8 * largest_bytes < whole_bytes / 8
