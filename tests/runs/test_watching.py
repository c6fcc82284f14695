"""What is said of runs whose folders stand as they do after accidents. No torchrun is needed for it."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mics.config import RunConfig, TrainConfig

from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.remote.host import HostError
from micsctl.runs.follow import follow
from micsctl.runs.logs import rank_log
from micsctl.runs.model import Run, Status
from micsctl.runs.prepare import prepare
from micsctl.runs.state import list_runs
from micsctl.topology.model import Topology

from .conftest import LocalHost

Hosts = list[Any]
RESOLVED: dict[str, Any] = {
    "partition": 2,
    "hierarchical": False,
    "micro_batch": 1,
    "precision": "fp32",
    "checkpointing": "none",
    "reshard_after_forward": True,
}
RUN_ID = "0101-000000-mics-aaaa"
FOLDER = f".micsctl/runs/{RUN_ID}"
TRAIN = TrainConfig(**RESOLVED, steps=3)
CONFIG = RunConfig(run_id=RUN_ID, train=TRAIN, nodes=2, devices_per_node=2)


class Watcher:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines: list[str] = []

    def metrics(self, line: dict[str, Any]) -> None:
        self.steps.append(line["step"])

    def output(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def run(hosts: Hosts) -> Hosts:
    """Hosts with a run that is done."""
    for host in hosts:
        host.write(f"{FOLDER}/run.json", CONFIG.to_json())
        host.write(f"{FOLDER}/pid", "1")
        host.write(f"{FOLDER}/exit", "0\n")
        for local in (0, 1):
            host.write(f"{FOLDER}/ranks/x/attempt_0/{local}/stdout.log", f"rank {2 * host.index + local}\n")
            host.write(f"{FOLDER}/ranks/x/attempt_0/{local}/stderr.log", "")
    hosts[0].write(f"{FOLDER}/metrics.jsonl", '{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    return hosts


def let_live(host: LocalHost) -> subprocess.Popen[bytes]:
    """A launcher that is alive: a process that works in the run's folder."""
    (host.home / FOLDER / "exit").unlink(missing_ok=True)
    process = subprocess.Popen(["sleep", "60"], cwd=host.home / FOLDER)
    host.write(f"{FOLDER}/pid", str(process.pid))
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=10)


def test_a_metrics_line_that_a_kill_cut_short_is_left_out(run: Hosts) -> None:
    watcher = Watcher()
    follow(run, RUN_ID, watcher, poll_seconds=0.1)
    assert (watcher.steps, watcher.lines) == ([1], ["rank 0"])


def test_a_pid_that_another_process_got_is_no_living_launcher(run: Hosts) -> None:
    (run[1].home / FOLDER / "exit").unlink()
    run[1].write(f"{FOLDER}/pid", str(os.getpid()))
    with pytest.raises(JobError, match="failed") as raised:
        follow(run, RUN_ID, Watcher(), poll_seconds=0.1)
    assert "killed on node 1" in raised.value.why
    lines: list[str] = []
    rank_log(run, Run(RUN_ID, CONFIG, (), None, None), 2, lines.append, follow=True)
    assert lines == ["rank 2"]


def test_a_watcher_that_cannot_go_on_ends_the_watching(run: Hosts) -> None:
    """The reader of our output has left, as in `micsctl launch | head`."""
    watcher = Watcher()

    def closed(line: str) -> None:
        raise BrokenPipeError

    watcher.output = closed  # type: ignore[method-assign]
    launcher = let_live(run[0])
    try:
        with pytest.raises(BrokenPipeError):
            follow(run, RUN_ID, watcher, poll_seconds=0.1)
    finally:
        end(launcher)


def test_a_run_that_is_done_is_done_though_the_stream_broke(run: Hosts) -> None:
    class Breaking(LocalHost):
        def stream(self, command: str, on_line: Any) -> int:
            raise HostError("lost the connection to node 0")

    watcher = Watcher()
    follow([Breaking(0, run[0].home), run[1]], RUN_ID, watcher, poll_seconds=0.1)
    assert watcher.lines == ["not all output was seen: lost the connection to node 0"]


def test_a_followed_log_is_waited_for(run: Hosts) -> None:
    launcher = let_live(run[1])
    log = run[1].home / FOLDER / "ranks/x/attempt_0/1/stdout.log"
    log.unlink()
    lines: list[str] = []

    def write_and_end() -> None:
        log.write_text("at last\n")
        end(launcher)

    later = threading.Timer(0.5, write_and_end)
    later.start()
    rank_log(run, Run(RUN_ID, CONFIG, (), None, None), 3, lines.append, follow=True)
    later.join(timeout=10)
    assert lines == ["at last"]


@pytest.mark.parametrize(("rank", "says"), [(4, "has no rank 4"), (3, "log of rank 3 is lost")])
def test_a_log_that_nobody_has(run: Hosts, rank: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        rank_log(run[:1], Run(RUN_ID, CONFIG, (), None, None), rank, lambda line: None)


def test_a_run_is_alive_below_a_home_that_is_a_symbolic_link(run: Hosts, tmp_path: Path) -> None:
    launchers = [let_live(host) for host in run]
    linked = tmp_path / "link"
    linked.symlink_to(run[0].home)
    try:
        [found] = list_runs([LocalHost(0, linked)])
    finally:
        for launcher in launchers:
            end(launcher)
    assert found.status is Status.RUNNING
    assert (found.last_step, found.last_loss) == (None, None)  # the last line is not whole


def test_a_run_of_another_version_is_explained(run: Hosts) -> None:
    run[0].write(f"{FOLDER}/run.json", '{"from": "the future"}')
    with pytest.raises(MicsctlError, match=f"run.json of run {RUN_ID}") as raised:
        list_runs(run)
    assert "another version" in raised.value.why


def test_every_comparison_is_one_flag(hosts: Hosts, topology: Topology) -> None:
    """What the file says of p and of hierarchy must not stand in the way of a strategy that fixes them."""
    train = TrainConfig(partition=4, hierarchical=True)
    roomy = Topology(tuple(replace(node, devices=_roomy(node.devices)) for node in topology.nodes))
    chosen = {s: prepare(train, roomy, hosts, strategy=s).train for s in ("mics", "mics-flat", "zero3", "ddp")}
    assert {s: (t.partition, t.hierarchical) for s, t in chosen.items()} == {
        "mics": (4, True), "mics-flat": (4, False), "zero3": (4, False), "ddp": (1, False),
    }  # fmt: skip


def test_a_resumed_run_goes_on_from_the_folder_of_the_earlier_one(run: Hosts, topology: Topology) -> None:
    resumed = prepare(TrainConfig(), topology, run, resume=RUN_ID)
    assert resumed.resume_from == CONFIG.checkpoint_folder
    assert resumed.run_id != RUN_ID


def _roomy(devices: Any) -> Any:
    return tuple(replace(device, memory_bytes=8 << 30) for device in devices)
