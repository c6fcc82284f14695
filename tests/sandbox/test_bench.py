"""`micsctl bench` end to end, on sandboxes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from micsctl.home import Home
from micsctl.sandbox import control

MICSCTL = Path(sys.executable).with_name("micsctl")
pytestmark = [pytest.mark.sandbox, pytest.mark.distributed, pytest.mark.timeout(600)]
ROW = {
    "strategy": str,
    "partition_size": int,
    "hierarchical": bool,
    "reduce_scatter": str,
    "step_seconds": dict,
    "unshaped_step_seconds": float | None,
    "traffic_bytes": float | None,
    "traffic_formula_bytes": float,
    "speedup_vs_zero3": float,
    "loss": float,
}


def bench(folder: Path, level: str, *arguments: str, code: int = 0) -> Any:
    """The JSON on stdout; nothing of the sandboxes is left."""
    environment = {**os.environ, "MICSCTL_HOME": str(folder / "home"), control.LEVEL_VARIABLE: level}
    done = subprocess.run(
        [MICSCTL, "bench", *arguments, "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert control.leftovers(Home(folder / "home/bench")).total == 0
    assert not (folder / "home/bench").exists()
    return json.loads(done.stdout)


def check_rows(found: Any) -> dict[str, Any]:
    for row in found["rows"]:
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), (key, row[key])
        seconds = row["step_seconds"]
        assert set(seconds) == {"median", "min", "max"}
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert found["losses_equal"] is True
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name["zero3, p = 4"]["speedup_vs_zero3"] == 1.0
    return by_name


def test_strategies_at_the_process_level(tmp_path: Path) -> None:
    asked = ("--strategies", "mics,zero3", "--model", "gpt-3m", "--nodes", "2", "--steps", "1", "--warmup", "1")
    found = bench(tmp_path, "process", "strategies", *asked)
    assert (found["nodes"], found["ranks_per_node"], found["micro_steps"], found["link_mbps"]) == (2, 2, 4, None)
    rows = check_rows(found)
    assert {(row["strategy"], row["partition_size"], row["reduce_scatter"]) for row in rows.values()} == {
        ("mics", 2, "ring"), ("mics, hop 2 every micro-step", 2, "ring"), ("mics", 4, "ring"),
        ("zero3", 4, "ring"), ("zero3", 4, "native"), ("zero3", 4, "direct"),
    }  # fmt: skip
    assert {row["unshaped_step_seconds"] for row in rows.values()} == {None}
    counted = [row for row in rows.values() if row["reduce_scatter"] == "ring"]  # the others are not mics' own
    assert len(counted) == 4
    for row in counted:
        assert row["traffic_source"] == "counted"
        assert row["traffic_bytes"] == pytest.approx(row["traffic_formula_bytes"], rel=0.01)
    assert "say nothing about networks" in found["caption"]
    assert "<svg" in (tmp_path / "bench/strategies/report.html").read_text()
    assert json.loads((tmp_path / "bench/strategies/result.json").read_text()) == found


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="shaped links need root")
def test_strategies_on_shaped_links(tmp_path: Path) -> None:
    asked = (
        "--strategies",
        "mics,mics-flat,zero3",
        "--model",
        "gpt-3m",
        "--nodes",
        "2",
        "--steps",
        "3",
        "--warmup",
        "1",
    )
    found = bench(tmp_path, "netns", "strategies", *asked, "--link-mbps", "200")
    assert (found["nodes"], found["ranks_per_node"], found["micro_steps"], found["link_mbps"]) == (2, 2, 4, 200)
    rows = check_rows(found)
    for row in rows.values():
        assert row["traffic_source"] == "interface"
        assert row["traffic_bytes"] == pytest.approx(row["traffic_formula_bytes"], rel=0.02)
        assert 0 < row["unshaped_step_seconds"] < row["step_seconds"]["max"]
        link_seconds = row["traffic_formula_bytes"] * 8 / 200e6
        assert row["step_over_bound"] * max(row["unshaped_step_seconds"], link_seconds) == pytest.approx(
            row["step_seconds"]["median"]
        )
    assert rows["mics, p = 2"]["speedup_vs_zero3"] > 1.2
    headline = found["claims"][0]
    assert (headline["fast"], headline["slow"]) == ("mics, p = 2", "zero3, p = 4")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="interfaces of their own need root")
def test_traffic_agrees_with_the_formula(tmp_path: Path) -> None:
    found = bench(tmp_path, "netns", "traffic", "--nodes", "2", "--strategies", "mics,mics-flat,zero3,zero2,ddp")
    assert found["ok"] is True
    assert {cell["devices_per_node"] for cell in found["cells"]} == {1, 2}  # 4 x 1 and 2 x 2 ranks
    assert {cell["micro_steps"] for cell in found["cells"]} == {1, 4}
    for cell in found["cells"]:
        low, high = cell["allowed_bytes"]
        assert low <= cell["traffic_bytes"] <= high
        assert cell["traffic_source"] == "interface"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="shaped links need root")
def test_collectives_and_scaling(tmp_path: Path) -> None:
    found = bench(tmp_path, "netns", "collectives", "--nodes", "2", "--steps", "1")
    assert 20e6 < found["tcp_bytes_per_second"] < 60e6  # of 50 MB/s
    names = {(row["collective"], row["partition_size"], row["hierarchical"]) for row in found["rows"]}
    assert {("gather", 4, True), ("gather", 4, False), ("reduce_scatter", 4, True), ("all_reduce", 2, False)} <= names
    asked = ("--sizes", "1,2", "--rounds", "1", "--steps", "1", "--emulate-compute", "--link-mbps", "2000")
    found = bench(tmp_path, "netns", "scaling", *asked)
    one, two = found["rows"]
    assert (one["nodes"], one["weak_efficiency"], one["compute_per_hop2"]) == (1, 1.0, None)
    assert 0.5 < two["weak_efficiency"] < 1.2
    assert two["compute_per_hop2"] == pytest.approx(two["planned_compute_per_hop2"])
    assert any("Every byte of communication is real" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "MICSCTL_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}
    command = [MICSCTL, "bench", "strategies", "--strategies", "mics", "--model", "gpt-3m", "--nodes", "2"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert running.stdout
    for line in running.stdout:
        if " 1/" in line:  # the first measurement
            break
    running.send_signal(signal.SIGINT)
    rest = running.stdout.read()
    assert running.wait(timeout=60) == 130, rest
    assert "nothing is left of the benchmark" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "home/bench").exists()
    still = subprocess.run(["pgrep", "-af", str(tmp_path)], capture_output=True, text=True, timeout=10, check=False)
    assert still.stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", ["process", "netns"])
def test_a_benchmark_that_is_killed_leaves_nothing_that_runs(tmp_path: Path, level: str) -> None:
    """And another one starts there."""
    if level == "netns" and os.geteuid() != 0:
        pytest.skip("namespaces need root")
    environment = {**os.environ, "MICSCTL_HOME": str(tmp_path / "home"), control.LEVEL_VARIABLE: level}
    asked = ("strategies", "--strategies", "ddp", "--model", "gpt-3m", "--nodes", "2", "--devices-per-node", "1")
    killed = subprocess.Popen(
        [MICSCTL, "bench", *asked], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert killed.stderr
    for line in killed.stderr:
        if " 1/" in line:  # the first measurement
            break
    killed.kill()
    killed.wait(timeout=60)
    deadline = time.monotonic() + 60
    while control.leftovers(Home(tmp_path / "home/bench")).total and time.monotonic() < deadline:
        time.sleep(0.2)
    assert control.leftovers(Home(tmp_path / "home/bench")).total == 0
    found = bench(tmp_path, level, *asked, "--steps", "1", "--warmup", "0")
    assert [row["name"] for row in found["rows"]] == ["ddp, p = 1"]
