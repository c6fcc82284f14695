"""The trainer's pure parts: model, schedule, metrics, paths, places."""

import io
import json
import math

import mics.metrics
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.checkpoint import Progress
from mics.collectives import STAGES, StageCount
from mics.errors import RunRefusedError
from mics.init import key_of, materialise
from mics.metrics import InterfaceCounter, RankStep, StepLog, lines_until, readable, record_of, sent_bytes
from mics.models.gpt import IGNORED, build_on_meta, summed_loss
from mics.optim import adamw, learning_rate
from mics.paths import on_this_node
from mics.ranks import Place, check_place, place_of
from mics.shapes import PRESETS, ModelShape
from mics.train import due
from torch.nn import functional


def tiny_model(seed=0, **shape):
    model = build_on_meta(
        ModelShape(**{"hidden": 12, "layers": 2, "heads": 3, "positions": 16, **shape}), torch.float64
    )
    materialise(model, model.fill, seed=seed, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_the_planner_counts(name):
    model = build_on_meta(PRESETS[name], torch.float32)
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    for block in model.blocks:
        assert sum(p.numel() for p in block.parameters()) == PRESETS[name].block_parameters


@settings(deadline=None, max_examples=20)
@given(
    heads=st.integers(1, 4),
    width=st.integers(1, 5),
    layers=st.integers(1, 3),
    ffn=st.integers(0, 9),
    vocabulary=st.integers(1, 300),
)
def test_any_shape_has_the_parameters_that_the_planner_counts(heads, width, layers, ffn, vocabulary):
    shape = ModelShape(heads * width, layers, heads, vocabulary, ffn)
    assert sum(p.numel() for p in build_on_meta(shape, torch.float32).parameters()) == shape.parameters


def test_the_model_does_not_look_ahead():
    model, ids = tiny_model(), torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9] += 1
    before, after = model(ids), model(changed % 256)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-14)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-9


def test_the_head_is_the_token_embedding():
    model = tiny_model()
    assert "head.weight" not in dict(model.named_parameters())
    summed_loss(model, torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 7)).backward()
    assert model.tokens.weight.grad[7].abs().sum() > 0  # never an input: reached through the head only


def test_the_loss_sums_over_valid_targets_only():
    model, ids = tiny_model(), torch.randint(256, (2, 8))
    targets = torch.randint(256, (2, 8))
    targets[0, 3:] = IGNORED
    each = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(summed_loss(model, ids, targets), each.sum())
    assert (each != 0).sum() == 11


def test_weights_are_keyed_by_seed_and_name():
    weights = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    again = dict(tiny_model().named_parameters())
    other = dict(tiny_model(seed=1).named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["tokens.weight"], other["tokens.weight"])
    assert not torch.equal(weights["blocks.0.attention.qkv.weight"], weights["blocks.1.attention.qkv.weight"])
    # A deeper model does not change the weights that it shares with a shallow one, where the rule has no depth in it.
    assert torch.equal(dict(tiny_model(layers=5).named_parameters())["tokens.weight"], weights["tokens.weight"])
    assert key_of(0, "1:a") != key_of(0, "a") != key_of(1, "a")


def test_matrices_decay_and_norms_and_biases_do_not():
    decayed, others = adamw(tiny_model(), lr=1e-3, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}


@given(st.integers(0, 50), st.integers(1, 200), st.floats(1e-6, 1.0))
def test_the_schedule_warms_up_to_the_peak_and_falls_to_a_tenth(warmup, steps, peak):
    rates = [learning_rate(step, peak=peak, warmup=warmup, steps=steps) for step in range(steps)]
    rise, fall = rates[:warmup], rates[warmup:]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    if 0 < warmup <= steps:
        assert math.isclose(rates[warmup - 1], peak)
    if steps > warmup:
        assert math.isclose(rates[-1], peak / 10)


def test_the_schedule_in_numbers():
    rates = [learning_rate(step, peak=1.0, warmup=2, steps=6) for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)


def test_a_checkpoint_is_due_every_so_often_and_at_the_end():
    assert [step for step in range(1, 8) if due(step, every=3, last=step == 7)] == [3, 6, 7]
    assert not due(7, every=0, last=True)


def rank_step(loss=1.0, hop2_bytes=100, interface_bytes=0, memory_bytes=5):
    stages = {stage: StageCount() for stage in STAGES} | {"hop2": StageCount(2, hop2_bytes, 0.5)}
    return RankStep(loss, False, interface_bytes, memory_bytes, stages)


def record(run, ranks, step=2):
    numbers = {"tokens": 128, "grad_norm": 0.5, "lr": 1e-3, "step_seconds": 0.25}
    return record_of(ranks, run, Progress(step, 16), **numbers)


def test_a_record_sums_losses_and_takes_the_mean_over_nodes(tiny_run):
    ranks = [rank_step(0.25 * (i + 1), hop2_bytes=100 * i, memory_bytes=i) for i in range(4)]
    line = record(tiny_run(nodes=2, devices=2), ranks)
    assert json.loads(json.dumps(line)) == line
    assert set(line) == {
        *("step", "samples", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "traffic"),
        *("traffic_seconds", "traffic_bytes", "traffic_source", "traffic_formula_bytes", "memory_bytes"),
        "memory_source",
    }
    assert (line["step"], line["samples"], line["loss"], line["memory_bytes"]) == (2, 16, 2.5, 3)
    assert line["traffic"] == {**dict.fromkeys(STAGES, 0.0), "hop2": 300.0}
    assert line["traffic_seconds"]["hop2"] == 0.5
    assert (line["traffic_bytes"], line["traffic_source"]) == (300.0, "counted")
    assert line["tokens_per_second"] == 512


def test_with_an_interface_its_counters_are_the_traffic(tiny_run):
    ranks = [rank_step(interface_bytes=1000), rank_step(), rank_step(interface_bytes=2000), rank_step()]
    line = record(tiny_run(nodes=2, devices=2, interface="eth0"), ranks)
    assert (line["traffic_bytes"], line["traffic_source"]) == (1500.0, "interface")
    assert line["traffic"]["hop2"] == 200.0


def test_the_formula_knows_the_precision(tiny_run):
    runs = {precision: tiny_run(precision=precision, strategy="zero3", partition=4) for precision in ("fp32", "bf16")}
    full, half = (record(run, [rank_step()] * 4)["traffic_formula_bytes"] for run in runs.values())
    assert full > half > full / 2  # bf16 halves the gathers, not the gradients


TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 1234567    1200    0    0    0     0          0         0  1234567    1200    0    0    0     0       0
  ens5:98765432   88888    0    0    0     0          0         0 55555555   44444    0    0    0     0       0
"""


def test_bytes_sent_are_read_from_the_kernels_table():
    assert sent_bytes("ens5", TABLE) == 55555555
    with pytest.raises(RunRefusedError, match="interface eth9 is not on this node; it has lo, ens5"):
        sent_bytes("eth9", TABLE)


def test_the_counter_leaves_out_what_a_checkpoint_sends(tmp_path, monkeypatch):
    table = tmp_path / "dev"
    monkeypatch.setattr(mics.metrics, "INTERFACES", table)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)

    def sent(total):
        table.write_text(TABLE.replace("55555555", str(total)))

    sent(1000)
    counter = InterfaceCounter("ens5")
    sent(1500)
    assert counter.take() == 500
    sent(9000)
    counter.restart()
    sent(9070)
    assert counter.take() == 70
    assert InterfaceCounter(None).take() == 0


def test_a_resumed_log_keeps_the_steps_that_do_not_come_again():
    text = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 3, "lo'
    assert lines_until(text, 2) == '{"step": 1}\n{"step": 2}\n'
    assert lines_until(text, 9) == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert lines_until(text, 0) == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_pipe_and_one_line_with_eta_on_a_terminal(tmp_path, tiny_run):
    run = tiny_run()
    for screen in (io.StringIO(), Terminal()):
        log = StepLog(tmp_path / "metrics.jsonl", start=0, steps=3, screen=screen)
        for step in (1, 2, 3):
            log.write(record(run, [rank_step()] * 4, step))
        shown = screen.getvalue()
        assert shown.count("\n") == (1 if screen.isatty() else 3)
        assert shown.count("\r") == (3 if screen.isatty() else 0)
        assert "step 3/3" in shown
        assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_line_for_people(tiny_run):
    line = readable(record(tiny_run(), [rank_step(1.03)] * 4), steps=9, eta_seconds=3725.4)
    assert line.startswith("step 2/9  loss 4.1200  norm 0.50  lr 1.00e-03  0.25 s  512 tok/s")
    assert line.endswith("eta 1:02:05")


@pytest.mark.parametrize(
    ("path", "shared", "expected"),
    [
        ("/fsx/demo", "/tmp/shared", "/tmp/shared/demo"),
        ("/fsx", "/tmp/shared", "/tmp/shared"),
        ("/fsx2/demo", "/tmp/shared", "/fsx2/demo"),
        ("/data/fsx", "/tmp/shared", "/data/fsx"),
        ("/fsx/demo", "", "/fsx/demo"),
        ("/fsx/demo", None, "/fsx/demo"),
    ],
)
def test_fsx_is_what_the_environment_says(path, shared, expected):
    assert on_this_node(path, {} if shared is None else {"MICS_SHARED": shared}) == expected


def test_a_place_comes_from_torchrun_and_must_fit_the_run():
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    place = place_of(environment)
    assert place == Place(5, 1, 8, 2)
    assert place.node == 2
    check_place(place, nodes=4, devices_per_node=2)
    with pytest.raises(RunRefusedError, match="2 nodes x 4 devices = 8 processes, torchrun started 8 with 2 on this"):
        check_place(place, nodes=2, devices_per_node=4)
    with pytest.raises(RunRefusedError, match="'WORLD_SIZE' is not set"):
        place_of({"RANK": "0", "LOCAL_RANK": "0"})
