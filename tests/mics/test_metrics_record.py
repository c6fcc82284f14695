"""The lines of metrics.jsonl: pure parts, the screen, TensorBoard."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import mics.metrics
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mics.board import Board, scalars
from mics.collectives import STAGES, StageCount
from mics.config import TrainConfig
from mics.errors import RunFolderError, RunRefusedError
from mics.metrics import (
    Expected,
    InterfaceCounter,
    RankStep,
    StepLog,
    expected,
    formula,
    lines_until,
    rank_step,
    readable,
    record_of,
    sent_bytes,
)
from mics.models.build import build
from mics.peak import peak_flops
from mics.precision import DTYPES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
KNOWN = Expected(traffic_bytes=1000.0, flops_per_token=2e6, peak_flops=None)


def rank_of(loss=1.0, hop2_bytes=100, interface_bytes=0, memory_bytes=5, **seconds):
    stages = {stage: StageCount() for stage in STAGES} | {"hop2": StageCount(2, hop2_bytes, 0.5)}
    parts = {f"{part}_seconds": seconds.get(part, 0.0) for part in ("data", "compute", "forward", "optimizer")}
    return RankStep(loss, False, interface_bytes, memory_bytes, stages=stages, **parts)


def record(run, ranks, step=2, known=KNOWN, **changes):
    numbers = {"tokens": 100, "grad_norm": 0.5, "lr": 1e-3, "step_seconds": 0.25, "loss_scale": 1.0}
    numbers |= {"skipped": False, "skipped_in_row": 0, "samples": 16}
    return record_of(ranks, run, known, step=step, **{**numbers, **changes})


def test_a_record_sums_losses_and_takes_the_mean_over_nodes(tiny_run):
    ranks = [rank_of(0.25 * (i + 1), hop2_bytes=100 * i, memory_bytes=i, compute=0.1 * i) for i in range(4)]
    line = record(tiny_run(nodes=2, devices=2), ranks)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert (line["step"], line["samples"], line["loss"], line["memory_bytes"]) == (2, 16, 2.5, 3)
    assert line["traffic"] == {**dict.fromkeys(STAGES, 0.0), "hop2": 300.0}
    assert line["traffic_seconds"]["hop2"] == 0.5
    assert line["compute_seconds"] == pytest.approx(0.15)
    assert (line["traffic_bytes"], line["traffic_source"]) == (300.0, "counted")
    assert line["traffic_formula_bytes"] == 1000.0


def test_every_key_is_documented_and_every_documented_key_is_written(tiny_run):
    rows = re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.M)
    written = set(record(tiny_run(), [rank_of()] * 4)) | {"validation_loss"}
    assert set(rows) == written
    assert len(rows) == len(set(rows))


def test_with_an_interface_its_counters_are_the_traffic(tiny_run):
    ranks = [rank_of(interface_bytes=1000), rank_of(), rank_of(interface_bytes=2000), rank_of()]
    line = record(tiny_run(nodes=2, devices=2, interface="eth0"), ranks)
    assert (line["traffic_bytes"], line["traffic_source"]) == (1500.0, "interface")
    assert line["traffic"]["hop2"] == 200.0


def test_speed_counts_every_token_and_flops_say_whether_recomputed_ones_are_in(tiny_run):
    # 4 ranks x 2 micro-steps x 1 sequence x 16 tokens in 0.25 s: 512 tokens/s; forward 2e6 FLOPs each, times three.
    known = replace(KNOWN, peak_flops=1e9)
    plain = record(tiny_run(checkpointing="none"), [rank_of()] * 4, known=known)
    full = record(tiny_run(checkpointing="full"), [rank_of()] * 4, known=known)
    assert (plain["tokens_per_second"], plain["samples_per_second"]) == (512, 32)
    assert plain["tflops_per_device"] == pytest.approx(3 * 2e6 * 512 / 4 / 1e12)
    assert plain["tflops_per_device_with_recompute"] == plain["tflops_per_device"] == full["tflops_per_device"]
    assert full["tflops_per_device_with_recompute"] == pytest.approx(plain["tflops_per_device"] * 4 / 3)
    assert plain["mfu"] == full["mfu"] == pytest.approx(3 * 2e6 * 128 / 1e9)
    assert record(tiny_run(), [rank_of()] * 4)["mfu"] is None


def test_a_skipped_step_is_strict_json(tiny_run):
    line = record(tiny_run(), [rank_of(math.nan)] * 4, grad_norm=math.inf, skipped=True, skipped_in_row=3)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert (line["loss"], line["grad_norm"], line["skipped"], line["skipped_in_row"]) == (None, None, True, 3)
    shown = readable(line, steps=9, eta_seconds=1)
    assert "loss nan  norm nan" in shown
    assert "skipped" in shown


def test_the_formula_takes_sizes_dtypes_and_reshard_from_run_and_model(tiny_run):
    def total(**train):
        run = tiny_run(strategy="zero3", partition=4, **train)
        return formula(run, build(run.train, DTYPES[run.precision].master)).total

    full, half, kept = total(), total(precision="bf16"), total(reshard_after_forward=False)
    assert full > half > full / 2  # bf16 halves the gathers, not the gradients
    assert half < kept < full  # one gather of the blocks instead of two


def test_on_a_cpu_no_peak_is_known(tiny_run):
    run = tiny_run(precision="bf16")
    built = build(run.train, torch.float32)
    assert expected(run, built) == Expected(formula(run, built).total, built.flops_per_token, None)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_go_by_the_device_name(name, tflops):
    assert peak_flops(name) == tflops * 1e12
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


@given(st.floats(0, 8))
def test_compute_is_what_waits_for_collectives_leave(exposed_seconds):
    """Collectives that run beside the computation take nothing from it, however long they are."""
    seconds = dict.fromkeys(("data", "forward", "optimizer"), 0.125)
    stages = {stage: StageCount(1, 0, 100.0) for stage in STAGES}
    mine = rank_step(1.0, False, 0, {**seconds, "compute": 4.0}, stages, exposed_seconds)
    assert mine.compute_seconds == pytest.approx(max(0.0, 4.0 - exposed_seconds))
    assert mine.data_seconds == mine.forward_seconds == mine.optimizer_seconds == 0.125


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
    counter = InterfaceCounter("ens5", reads=True)
    sent(1500)
    assert counter.take() == 500
    sent(9000)
    counter.restart()
    sent(9070)
    assert counter.take() == 70
    assert InterfaceCounter("ens5", reads=False).take() == 0
    nowhere = InterfaceCounter(None, reads=True)
    nowhere.restart()  # there is no process group: it waits for nobody
    assert nowhere.take() == 0


def test_a_resumed_log_keeps_the_steps_that_do_not_come_again():
    text = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 3, "lo'
    assert lines_until(text, 2) == '{"step": 1}\n{"step": 2}\n'
    assert lines_until(text, 9) == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert lines_until(text, 0) == ""
    assert lines_until('5\nnull\n{}\n{"step": null}\n{"step": 1}\n', 9) == '{"step": 1}\n'


def test_a_run_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"metrics.jsonl cannot be written: Is a directory"):
        StepLog(tmp_path / "metrics.jsonl", start=0, steps=3)
    (tmp_path / "binary").write_bytes(b'\xff\xfe\n{"step": 1}\n')
    StepLog(tmp_path / "binary", start=1, steps=3)
    assert (tmp_path / "binary").read_text() == '{"step": 1}\n'


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_pipe_and_one_line_with_eta_on_a_terminal(tmp_path, tiny_run):
    run = tiny_run()
    for screen in (io.StringIO(), Terminal()):
        log = StepLog(tmp_path / "metrics.jsonl", start=0, steps=3, screen=screen)
        for step in (1, 2, 3):
            log.write(record(run, [rank_of()] * 4, step))
        shown = screen.getvalue()
        assert shown.count("\n") == (1 if screen.isatty() else 3)
        assert shown.count("\r") == (3 if screen.isatty() else 0)
        assert "step 3/3" in shown
        assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_note_has_a_line_of_its_own(tmp_path, tiny_run):
    for screen in (io.StringIO(), Terminal()):
        log = StepLog(tmp_path / "metrics.jsonl", start=0, steps=3, screen=screen)
        log.write(record(tiny_run(), [rank_of()] * 4, 1))
        log.note("rank 3, i-0abc, 2.0x slower in compute")
        assert re.search(r"[\r\n]rank 3, i-0abc, 2\.0x slower in compute(\x1b\[K)?\n$", screen.getvalue())


def test_a_line_for_people(tiny_run):
    line = readable(record(tiny_run(), [rank_of(1.03)] * 4), steps=9, eta_seconds=3725.4)
    assert line.startswith("step 2/9  loss 4.1200  norm 0.50  lr 1.00e-03  0.25 s  512 tok/s")
    assert line.endswith("eta 1:02:05")
    fast = record(tiny_run(), [rank_of()] * 4, known=replace(KNOWN, peak_flops=1e9)) | {"validation_loss": 3.5}
    assert "  validation 3.5000  mfu 76.8%  eta" in readable(fast, steps=9, eta_seconds=0)


def test_the_board_gets_every_number(tmp_path, tiny_run):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path / "board", start=0)
    for step in (1, 2):
        board.write(record(tiny_run(), [rank_of(step)] * 4, step))
    board.close()
    read = events.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 4.0), (2, 8.0)]
    assert read.Scalars("traffic/hop2")[0].value == 200.0


def test_text_and_missing_numbers_are_no_scalars():
    assert scalars({"step": 3, "loss": None, "mfu": 0.5, "skipped": True, "source": "x", "traffic": {"hop2": 2}}) == {
        "mfu": 0.5,
        "skipped": 1.0,
        "traffic/hop2": 2.0,
    }


def test_a_missing_tensorboard_is_refused_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RunRefusedError, match=r"tensorboard is not installed on this node.*pip install"):
        Board(tmp_path, start=0)
    assert not TrainConfig().tensorboard
