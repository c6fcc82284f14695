"""Training with the bundled trainer on several ranks: what may and what may not depend on the rank grid."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from mics.checkpoint import saver
from mics.config import LimitsConfig
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.job import prepare
from mics.models.build import build
from mics.ranks import Place
from mics.shapes import ModelShape
from mics.train import DivergedError, train
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


def cell_run(tiny_run, cell, *, ranks=4, **more):
    strategy, devices, partition, micro_batch, accumulation = cell
    return tiny_run(
        nodes=ranks // devices,
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
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def train_runs(runs, folder):
    """For each named run: (weights before, weights after), and the lines of metrics.jsonl."""
    results = {}
    for name, run in runs.items():
        job = prepare(run, place(run), torch.device("cpu"))
        before = whole(job.model)
        run_folder = folder / name
        run_folder.mkdir(exist_ok=True)
        assert train(job, run_folder)
        dist.barrier()
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
        results[name] = (before, whole(job.model), lines)
    return results


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def without_key_bias(weights):
    """The softmax cancels the keys' bias: its gradient is rounding alone, which Adam blows up to full steps."""
    return {
        name: torch.cat([p.chunk(3)[0], p.chunk(3)[2]]) if name.endswith("qkv.bias") else p
        for name, p in weights.items()
    }


@pytest.fixture
def odd_text(tmp_path):
    """21 windows of 16 bytes, the last of 5: three steps of 8 sequences enter a second epoch and meet the short one."""
    path = tmp_path / "text"
    path.write_bytes(bytes(i * i % 251 for i in range(20 * 16 + 6)))
    return str(path)


def test_weights_and_losses_do_not_depend_on_the_grid_or_the_cut_of_the_batch(run_ranks, tiny_run, tmp_path, odd_text):
    more = {"precision": "fp64", "data": (odd_text,)}
    runs = {name: cell_run(tiny_run, cell, **more) for name, cell in CELLS.items()}
    two = {"two ranks": cell_run(tiny_run, ("mics", 1, 2, 2, 2), ranks=2, **more)}
    on_four = run_ranks(train_runs, ranks=4, runs=runs, folder=tmp_path)
    on_two = run_ranks(train_runs, ranks=2, runs=two, folder=tmp_path)

    plain = build(runs["ddp"].train, torch.float64)
    materialise(plain.model, plain.fill, seed=0, device=torch.device("cpu"))
    initial = dict(plain.model.named_parameters())
    _, trained, reference = on_four[0]["ddp"]
    assert {line["tokens"] for line in reference} == {8 * 16, 8 * 16 - 11}
    assert largest_difference(initial, trained) > 1e-4
    for results in (*on_four, *on_two):
        for name, (before, after, lines) in results.items():
            assert largest_difference(before, initial) == 0, name
            assert largest_difference(after, trained) < 1e-12, name
            for line, expected in zip(lines, reference, strict=True):
                for key in ("step", "samples", "tokens", "lr"):
                    assert line[key] == expected[key], (name, key)
                for key in ("loss", "grad_norm"):
                    assert line[key] == pytest.approx(expected[key], abs=1e-12), (name, key)


def test_bf16_follows_fp32_and_the_counted_traffic_is_the_formula(run_ranks, tiny_run, tmp_path, odd_text):
    even = ModelShape(hidden=16, layers=2, heads=2, positions=16)  # 4 divides every width: no padding is sent
    runs = {
        f"{name} {precision}": cell_run(tiny_run, CELLS[name], model=even, precision=precision, data=(odd_text,))
        for name in ("mics hierarchical", "zero3", "mics 2 of 4")
        for precision in ("fp32", "bf16")
    }
    results = run_ranks(train_runs, ranks=4, runs=runs, folder=tmp_path)[0]
    for name, (_, after, lines) in results.items():
        assert {p.dtype for p in after.values()} == {torch.float32}
        for line in lines:
            assert line["traffic_bytes"] == pytest.approx(line["traffic_formula_bytes"], abs=8), name
            assert line["traffic_bytes"] > 0
            assert line["traffic_source"] == "counted"
            assert line["memory_source"] == "process_peak_resident"
            assert line["memory_bytes"] > 1e8
            assert line["step_seconds"] > 0
    for name in ("mics hierarchical", "zero3", "mics 2 of 4"):
        for full, half in zip(results[f"{name} fp32"][2], results[f"{name} bf16"][2], strict=True):
            assert 0 < abs(full["loss"] - half["loss"]) < 0.02
    assert results["zero3 bf16"][2][0]["traffic_bytes"] < results["zero3 fp32"][2][0]["traffic_bytes"]


def test_a_resumed_run_is_the_uninterrupted_one(run_ranks, tiny_run, tmp_path, odd_text):
    four = ("mics", 2, 4, 1, 1)
    saved = cell_run(tiny_run, four, ranks=8, data=(odd_text,), steps=4, every=2)
    more = {"data": (odd_text,), "steps": 4, "resume_from": f"{saved.checkpoint_folder}/step-2"}
    runs = {
        "straight": saved,
        "same": cell_run(tiny_run, four, ranks=8, **more),
        "p 2": cell_run(tiny_run, ("mics", 2, 2, 1, 1), ranks=8, **more),
        "p 8": cell_run(tiny_run, ("mics", 2, 8, 1, 1), ranks=8, **more),
        "done": cell_run(
            tiny_run, four, ranks=8, steps=4, data=(odd_text,), resume_from=saved.checkpoint_folder
        ),  # the newest
    }
    on_eight = run_ranks(train_runs, ranks=8, runs=runs, folder=tmp_path, deadline_s=90)[0]
    fewer = {"n 4": cell_run(tiny_run, ("zero3", 2, 4, 2, 1), **more)}
    results = {**on_eight, **run_ranks(train_runs, ranks=4, runs=fewer, folder=tmp_path)[0]}

    _, end, straight = results.pop("straight")
    before_done, after_done, lines_done = results.pop("done")
    assert largest_difference(before_done, end) == largest_difference(after_done, end) == 0
    assert lines_done == []
    at_two, end_of_same, same = results.pop("same")
    assert largest_difference(end_of_same, end) == 0
    exact = ("step", "samples", "tokens", "loss", "grad_norm", "lr")
    assert [[line[key] for key in exact] for line in same] == [[line[key] for key in exact] for line in straight[2:]]
    for name, (before, after, lines) in results.items():
        assert largest_difference(before, at_two) == 0, name
        assert largest_difference(without_key_bias(after), without_key_bias(end)) < 1e-6, name
        for line, expected in zip(lines, straight[2:], strict=True):
            assert (line["step"], line["samples"]) == (expected["step"], expected["samples"]), name
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6), name


def refusals(runs):
    """What each rank says about runs that it must refuse."""
    texts = []
    for run in runs:
        with pytest.raises(RunRefusedError) as refused:
            prepare(run, place(run), torch.device("cpu"))
        texts.append(str(refused.value))
    return texts


def save_refuse_and_diverge(run, folder, runs, wild):
    train_runs({"saved": run}, folder)
    texts = refusals(runs)
    write = saver.write_checkpoint
    saver.write_checkpoint = lambda *what: (time.sleep(1), write(*what))[1]  # the run ends before it does
    with pytest.raises(DivergedError, match=r"2 steps in a row \(step 3, loss None\); the weights are those of step 1"):
        train_runs({"wild": wild}, folder)
    saver.write_checkpoint = write
    assert [mark.parent.name for mark in (folder / "wild" / "tiny").glob("*/complete.json")] == ["step-1"]
    return texts


def test_bad_runs_are_refused_on_every_rank_and_one_that_diverges_keeps_its_last_good_checkpoint(
    run_ranks, tiny_run, tmp_path
):
    one = {"nodes": 1, "devices": 2}
    saved = tiny_run(**one, every=3)
    other = ModelShape(hidden=12, layers=3, heads=3, positions=16)
    (tmp_path / "empty").mkdir()
    bad = [
        tiny_run(**one, resume_from=tmp_path / "empty"),
        tiny_run(**one, resume_from=saved.checkpoint_folder, model=other),
        tiny_run(**one, interface="nosuch0"),
        tiny_run(**one, data=(str(tmp_path / "empty"),)),
        tiny_run(**one, every=1, checkpoints="/proc/nosuch"),
    ]
    wild = tiny_run(**one, every=1, checkpoints=tmp_path / "wild", lr=1e300, warmup=0, limits=LimitsConfig(2))
    expected = [
        "holds no whole checkpoint",
        "layers 2 instead of 3",
        "interface nosuch0 is not on this node; it has lo",
        "found 0 bytes, one step needs 65",
        "train.checkpoint.path /proc/nosuch cannot be written",
    ]
    on_ranks = run_ranks(save_refuse_and_diverge, ranks=2, run=saved, folder=tmp_path, runs=bad, wild=wild)
    assert on_ranks[0] == on_ranks[1]
    for text, part in zip(on_ranks[0], expected, strict=True):
        assert part in text
