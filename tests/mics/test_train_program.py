"""`python -m mics.train` as a program: exit codes, stderr, files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mics.checkpoint import MARK
from mics.config import LimitsConfig

pytestmark = pytest.mark.distributed

OWN_NOISE = """
import os
import torch
from torch import nn

class Model(nn.Module):
    vocabulary = 256

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 4)
        self.register_buffer("noise", torch.full((4,), float(os.environ["NOISE"])), persistent=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 256)

    def forward(self, ids):
        x = self.tokens(ids) * self.noise
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def outcome(process, deadline_s=60):
    """(exit codes by rank, the screen of rank 0, stderr of all ranks)"""
    output, errors = process.communicate(timeout=deadline_s + 10)
    *screen, codes = output.splitlines()
    return json.loads(codes), screen, errors.splitlines()


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_torchrun_trains_and_leaves_metrics_and_a_checkpoint(tmp_path, tiny_run):
    run = tiny_run(nodes=1, devices=2, every=2, precision="bf16")
    (tmp_path / "run.json").write_text(run.to_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "--log-dir", str(tmp_path / "logs"), "-m", "mics.train", "--config", str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [["step", f"{i}/3"] for i in (1, 2, 3)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    folder = tmp_path / "tiny"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["step-2", "step-3"]
    assert json.loads((folder / "step-3" / MARK).read_text())["progress"] == {"step": 3, "samples": 12}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_step_saves_and_exits_75(tmp_path, tiny_run, start_trainers, stop):
    run = tiny_run(nodes=1, devices=2, every=10**6, steps=10**6)
    process = start_trainers(run)
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 50
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(stop)
    codes, _, errors = outcome(process)
    assert codes == [75, 75], errors
    assert f"{stop.name}: stopping after step" in errors[-1]
    saved = tmp_path / "tiny" / f"step-{metrics(tmp_path)[-1]['step']}"
    assert [path.parent for path in (tmp_path / "tiny").glob(f"*/{MARK}")] == [saved]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"every": 0}, "train.checkpoint.every is 0"),
        ({"every": 10**6, "lr": 1e300, "warmup": 0, "limits": LimitsConfig(10**6)}, "its loss is not finite"),
    ],
    ids=["none wanted", "not finite"],
)
def test_a_stop_that_saves_nothing_says_so_and_exits_143(tmp_path, tiny_run, start_trainers, more, reason):
    process = start_trainers(tiny_run(nodes=1, devices=2, steps=10**6, **more))
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 50
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    codes, _, errors = outcome(process)
    assert codes == [143, 143], errors
    said = f"mics: stopped after step {metrics(tmp_path)[-1]['step']}, which no checkpoint holds: {reason}"
    assert errors.count(said) == 1, errors
    assert not list(tmp_path.glob(f"tiny/*/{MARK}"))


def test_ranks_save_and_end_when_their_torchrun_is_killed(tmp_path, tiny_run):
    run = tiny_run(nodes=1, devices=2, every=10**6, steps=10**6)
    (tmp_path / "run.json").write_text(run.to_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [
                *torchrun,
                "--log-dir",
                str(tmp_path / "logs"),
                "-m",
                "mics.train",
                "--config",
                str(tmp_path / "run.json"),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    log, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 80
    try:
        while not (log.exists() and log.read_text().count("\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.kill()
        process.wait()
    try:
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], (tmp_path / "output").read_text()
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert f"torchrun has died: stopping after step {last}" in (tmp_path / "output").read_text()
    assert [path.parent.name for path in (tmp_path / "tiny").glob(f"*/{MARK}")] == [f"step-{last}"]


def test_a_checkpoint_path_that_nodes_do_not_share_is_refused(tmp_path, tiny_run, start_trainers):
    run = tiny_run(nodes=2, devices=1, every=1, checkpoints="/fsx/demo")
    nodes = [{"MICS_SHARED": str(tmp_path / name)} for name in ("one", "two")]
    codes, screen, errors = outcome(start_trainers(run, nodes))
    assert codes == [2, 2]
    assert screen == []
    assert errors == [errors[0]] * 2  # local rank 0 of each node
    assert errors[0].startswith(f"mics: node 1: train.checkpoint.path {tmp_path}/two/demo is not shared")


def test_nodes_with_different_models_are_refused(tmp_path, tiny_run, start_trainers, monkeypatch):
    """Buffers are in no gradient and no checksum of the weights: nobody else would notice."""
    (tmp_path / "own_noise.py").write_text(OWN_NOISE)
    run = tiny_run(nodes=2, devices=1, model="own_noise:Model")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nodes = [{"NOISE": noise} for noise in ("1.0", "2.0")]
    codes, _, errors = outcome(start_trainers(run, nodes))
    assert codes == [2, 2], errors
    assert "rank 1 (node 1) has made another train.model, by parameters or buffers, than rank 0" in errors[0]


def test_a_log_that_cannot_be_written_is_said_by_the_rank_that_writes_it(tmp_path, tiny_run, start_trainers):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    codes, _, errors = outcome(start_trainers(tiny_run(nodes=1, devices=2)))
    assert codes[0] == 73
    assert f"mics: {tmp_path}/run/metrics.jsonl cannot be written: Is a directory" in errors


def test_nodes_with_different_data_are_refused_by_number(tmp_path, tiny_run, start_trainers):
    for name, text in (("one", b"a" * 1000), ("two", b"b" * 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_bytes(text)
    nodes = [{"MICS_SHARED": str(tmp_path / name)} for name in ("one", "two")]
    codes, _, errors = outcome(start_trainers(tiny_run(nodes=2, devices=1, data=("/fsx/text",)), nodes))
    assert codes == [2, 2]
    assert "node 1 has other data (1 files, 1000 bytes, sha256" in errors[0]


def test_a_short_corpus_is_refused_in_one_line(tmp_path, tiny_run, start_trainers):
    (tmp_path / "text").write_text("too short")
    codes, _, errors = outcome(start_trainers(tiny_run(nodes=1, devices=2, data=(str(tmp_path / "text"),))))
    assert codes == [2, 2]
    assert errors == [
        "mics: node 0: train.data: the corpus is too short: found 9 bytes, one step needs 65 "
        "(4 sequences of 16 bytes, and one more)"
    ]


def run_alone(*arguments, **environment):
    command = [sys.executable, "-m", "mics.train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_help_explains_itself():
    ended = run_alone("--help")
    assert ended.returncode == 0
    for part in ("torchrun --nnodes NODES", "run.json", "metrics.jsonl", "75  stopped by SIGTERM"):
        assert part in ended.stdout


def test_bad_starts_are_refused_in_one_line(tmp_path, tiny_run):
    path = tmp_path / "run.json"
    path.write_text(tiny_run(nodes=2, devices=2).to_json())
    alone = run_alone("--config", str(path))
    assert (alone.returncode, alone.stderr.count("\n")) == (2, 1)
    assert "torchrun starts them all" in alone.stderr
    path.write_text(path.read_text().replace('"accumulation"', '"acumulation"'))
    wrong = run_alone("--config", str(path))
    assert (wrong.returncode, wrong.stderr) == (2, f"mics: {path}: train: unknown key 'acumulation'\n")
