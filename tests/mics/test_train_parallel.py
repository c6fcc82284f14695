"""Training with the bundled trainer on several ranks: what may and what may not depend on the rank grid."""

import json
import os
from dataclasses import replace

import mics.checkpoint
import mics.train
import pytest
import torch
import torch.distributed as dist
from mics.checkpoint import newest_whole
from mics.errors import RunRefusedError
from mics.job import prepare
from mics.models.gpt import build_on_meta
from mics.init import materialise
from mics.ranks import Place
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.distributed

# Every cell has a global batch of 8 sequences; name: (strategy, k, p, micro-batch, accumulation), n = 4.
CELLS = {
    "ddp": ("ddp", 2, 1, 1, 2),
    "mics 2 of 4": ("mics", 2, 2, 1, 2),
    "mics 2 of 4, one micro-step": ("mics", 2, 2, 2, 1),
    "mics hierarchical": ("mics", 2, 4, 1, 2),
    "mics one node": ("mics", 4, 2, 1, 2),
    "mics-flat": ("mics-flat", 2, 4, 1, 2),
    "zero3": ("zero3", 2, 4, 1, 2),
}


def cell_run(tiny_run, cell, *, nodes_of=4, **more):
    strategy, devices, partition, micro_batch, accumulation = cell
    return tiny_run(
        nodes=nodes_of // devices,
        devices=devices,
        strategy=strategy,
        partition=partition,
        hierarchical=strategy == "mics" and partition > devices,
        micro_batch=micro_batch,
        accumulation=accumulation,
        **more,
    )


def place(run):
    k = run.devices_per_node
    return Place(dist.get_rank(), dist.get_rank() % k, run.world_size, k)


def whole(model):
    """Every parameter, unsharded, as numbers of their own."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()
    }


def train_runs(runs, folder):
    """For each named run: (weights before, weights after), and the lines of metrics.jsonl."""
    results = {}
    for name, run in runs.items():
        job = prepare(run, place(run), torch.device("cpu"))
        before = whole(job.model)
        run_folder = folder / name
        run_folder.mkdir(exist_ok=True)
        assert mics.train.train(job, run_folder, [])
        dist.barrier()
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
        results[name] = (before, whole(job.model), lines)
    return results


@pytest.fixture(scope="module")
def trained(run_ranks, tmp_path_factory):
    """The results of all cells in fp64, from rank 0."""
    return None


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_weights_and_losses_do_not_depend_on_the_grid_or_the_cut_of_the_batch(run_ranks, tiny_run, tmp_path):
    runs = {name: cell_run(tiny_run, cell, precision="fp64") for name, cell in CELLS.items()}
    on_four = run_ranks(train_runs, ranks=4, runs=runs, folder=tmp_path)
    two = {"two ranks": cell_run(tiny_run, ("mics", 1, 2, 2, 2), nodes_of=2, precision="fp64", hierarchical=True)}
    on_two = run_ranks(train_runs, ranks=2, runs=two, folder=tmp_path)

    plain = build_on_meta(runs["ddp"].train.shape, torch.float64)
    materialise(plain, plain.fill, seed=0, device=torch.device("cpu"))
    reference = on_four[0]["ddp"]
    for results in (*on_four, *on_two):
        for name, (before, after, lines) in results.items():
            assert largest_difference(before, dict(plain.named_parameters())) == 0, name
            assert largest_difference(after, reference[1]) < 1e-12, name
            assert largest_difference(after, before) > 1e-4, name
            for line, expected in zip(lines, reference[2], strict=True):
                for key in ("loss", "grad_norm"):
                    assert line[key] == pytest.approx(expected[key], abs=1e-12), (name, key)
                assert (line["step"], line["samples"], line["tokens"]) == (
                    expected["step"],
                    expected["samples"],
                    expected["tokens"],
                ), name
