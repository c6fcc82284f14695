"""A stall of the whole program under torchrun: what micsctl finds on the node afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mics.config import LimitsConfig

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def wait_for(condition, process, deadline_s=120):
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def process_of(rank):
    """The process that torchrun started as `rank` of this test's run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"MICS_TEST_STALL=yes" in variables and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    return None


def test_a_stopped_rank_ends_the_run_with_74_and_is_named(tmp_path, tiny_run):
    limits = LimitsConfig(first_step_seconds=100, step_seconds=4)
    (tmp_path / "run.json").write_text(tiny_run(nodes=1, devices=2, steps=10**6, limits=limits).to_json())
    torchrun = [sys.executable, "-m", "mics.node", str(tmp_path), "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*torchrun, "--log-dir", str(tmp_path / "logs"), "-m", "mics.train", "--config", str(tmp_path / "run.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MICS_TEST_STALL": "yes", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"},
        start_new_session=True,
    )
    log = tmp_path / "metrics.jsonl"
    try:
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3, process)
        os.kill(process_of(1), signal.SIGSTOP)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for left in filter(None, map(process_of, (0, 1))):
            os.kill(left, signal.SIGKILL)
    assert process.returncode == 74, errors
    account = json.loads((tmp_path / "failure.json").read_text())
    assert (account["rank"], account["exit_code"]) == (0, 74)
    assert re.fullmatch(r"stalled for [456] s in step \d+: rank 1 \(node 0\) is silent; .*", account["stall"])
    assert f"mics: {account['stall']}" in errors
    assert "in train" in (tmp_path / "stall" / "rank-0.txt").read_text()
