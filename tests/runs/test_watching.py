"""What is said of runs whose folders stand as they do after accidents. No torchrun is needed for it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mics.config import CheckpointConfig, ProfileConfig, RunConfig, TrainConfig
from mics.strategies import STRATEGIES

from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.remote.host import HostError
from micsctl.report.runs import summary, table
from micsctl.runs.follow import follow
from micsctl.runs.logs import rank_log
from micsctl.runs.model import BENCHMARK, NodeState, Run, Status, new_run_id
from micsctl.runs.prepare import prepare, with_profile
from micsctl.runs.shared import is_shared, require_shared
from micsctl.runs.state import first_failure, list_runs
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
NO_CHECKPOINTS = CheckpointConfig(every=0)
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


def test_ctrl_c_while_the_reader_starts_leaves_no_thread(
    run: Hosts,
    interrupted_as_threads_start: Callable[[Callable[[], object]], None],
) -> None:
    interrupted_as_threads_start(lambda: follow(run, RUN_ID, Watcher()))


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
    train = TrainConfig(partition=4, hierarchical=True, reshard_after_forward=2, checkpoint=NO_CHECKPOINTS)
    roomy = Topology(tuple(replace(node, devices=_roomy(node.devices)) for node in topology.nodes))
    chosen = {s: prepare(train, roomy, hosts, strategy=s).train for s in STRATEGIES}
    assert {s: (t.partition, t.hierarchical, t.reshard_after_forward) for s, t in chosen.items()} == {
        "mics": (4, True, 2), "mics-flat": (4, False, 2), "zero3": (4, False, 2), "zero2": (4, False, False),
        "ddp": (1, False, True),
    }  # fmt: skip


def test_a_resumed_run_goes_on_from_the_folder_of_the_earlier_one(run: Hosts, topology: Topology) -> None:
    resumed = prepare(TrainConfig(checkpoint=NO_CHECKPOINTS), topology, run, resume=RUN_ID)
    assert resumed.resume_from == CONFIG.checkpoint_folder
    assert resumed.run_id != RUN_ID


def _roomy(devices: Any) -> Any:
    return tuple(replace(device, memory_bytes=8 << 30) for device in devices)


@pytest.mark.parametrize(
    ("steps", "memory", "expected"),
    [
        (None, False, ProfileConfig()),
        ("7", False, ProfileConfig(7, 2)),
        ("7:5", True, ProfileConfig(7, 5, memory=True)),
    ],
)
def test_a_window_of_steps_is_one_flag(steps: str | None, memory: bool, expected: ProfileConfig) -> None:
    assert with_profile(TrainConfig(), steps=steps, memory=memory).profile == expected


@pytest.mark.parametrize(
    ("steps", "memory"), [("x", False), ("0", False), ("3:0", False), ("3:", False), ("99", False), (None, True)]
)
def test_a_window_that_makes_no_sense_is_usage(steps: str | None, memory: bool) -> None:
    with pytest.raises(UsageError):
        with_profile(TrainConfig(), steps=steps, memory=memory)


@pytest.mark.parametrize(
    ("type", "shared"),
    [
        *((name, True) for name in ("mounted", "lustre", "nfs", "nfs4", "fuse.glusterfs", "beegfs", "gpfs", "ceph")),
        *((name, False) for name in ("ext4", "xfs", "overlay", "tmpfs", "btrfs", "fuseblk", "fuse.fuse-overlayfs", "")),
    ],
)
def test_which_file_systems_machines_share(type: str, shared: bool) -> None:
    assert is_shared(type) == shared


def test_checkpoints_that_would_end_with_the_nodes_are_refused(hosts: Hosts, topology: Topology) -> None:
    """No such folder is there yet: its file system is that of the nearest one above it."""
    with pytest.raises(UsageError, match="lost with the nodes") as raised:
        prepare(TrainConfig(checkpoint=CheckpointConfig("/home/ubuntu/a/b c/d", every=5)), topology, hosts)
    assert raised.value.exit_code == 2
    for host in hosts:
        assert f"{host.name}: /home/ubuntu/a/b c/d is on its own disk (" in raised.value.why
    assert "disk ()" not in raised.value.why
    assert "s3://" in raised.value.next


def test_what_outlives_the_nodes_is_let_pass(hosts: Hosts, topology: Topology) -> None:
    require_shared([], "s3://bucket/a")
    require_shared(hosts, "s3://bucket/a")
    emulated = [LocalHost(host.index, host.home, {"MICS_SHARED": "/anywhere"}) for host in hosts]
    assert prepare(TrainConfig(), topology, emulated).train.checkpoint.path == "/fsx/checkpoints"
    with pytest.raises(UsageError):
        require_shared(emulated, "/var/checkpoints")


FAILED = {"rank": 3, "local_rank": 1, "at_seconds": 9, "pid": 1}
LOG = f"{FOLDER}/ranks/x/attempt_0"


@pytest.mark.parametrize(
    ("code", "error", "words", "next"),
    [
        (2, UsageError, "was refused by the trainer", "edit mics.yaml"),
        (73, JobError, "has ended: checkpoints cannot be written", "--resume"),
        (75, JobError, "was stopped and saved a checkpoint", "--resume"),
        (76, JobError, "has ended: too many steps without a finite gradient", "--resume"),
        (143, JobError, "was stopped", "micsctl launch"),
    ],
)
def test_how_the_trainer_ended_a_run_is_said_in_words(
    run: Hosts, code: int, error: type[MicsctlError], words: str, next: str
) -> None:
    """The rank that torchrun saw first was silent; the one that says why is another, on another node even."""
    for host in run:
        host.write(f"{FOLDER}/exit", f"{code}\n")
        host.write(f"{FOLDER}/failure.json", json.dumps(FAILED | {"exit_code": code, "at_seconds": 9 - host.index}))
    run[0].write(f"{LOG}/0/stderr.log", "a warning of torch\nmics: this is why\n[rank0] noise\n")
    with pytest.raises(error, match=words) as raised:
        follow(run, RUN_ID, Watcher(), poll_seconds=0.1)
    assert raised.value.why == "mics: this is why"
    assert next in raised.value.next


def test_after_a_stall_the_one_who_was_waited_for_is_named(run: Hosts) -> None:
    """He is killed in the end, on another node: that kill is not the cause."""
    line = "stalled for 600 s in step 7: rank 1, i-0 is silent"
    run[0].write(f"{FOLDER}/failure.json", json.dumps(FAILED | {"rank": 1, "exit_code": -9, "at_seconds": 5}))
    run[1].write(f"{FOLDER}/failure.json", json.dumps(FAILED | {"exit_code": 74, "stall": line}))
    for host, code in zip(run, (137, 74), strict=True):
        host.write(f"{FOLDER}/exit", f"{code}\n")
    with pytest.raises(JobError, match="a rank stood still") as raised:
        follow(run, RUN_ID, Watcher(), poll_seconds=0.1)
    assert raised.value.why == line
    assert f"{RUN_ID}/stall/rank-" in raised.value.next
    [found] = list_runs(run)
    assert (found.status, found.why) == (Status.FAILED, "a rank stood still")
    failure = first_failure(run, RUN_ID)
    assert failure
    assert failure.rank == 3


@pytest.mark.parametrize(
    ("codes", "status", "why"),
    [
        ((0, 0), Status.DONE, ""),
        ((75, 75), Status.STOPPED, "with a checkpoint"),
        ((143, 143), Status.STOPPED, "without a checkpoint"),
        ((76, 76), Status.FAILED, "too many steps without a finite gradient"),
        ((137, 1), Status.FAILED, "killed by SIGKILL"),
        ((1, 1), Status.FAILED, "exit code 1"),
        ((None, None), Status.LOST, "the machines or the launchers were killed"),
    ],
)
def test_why_a_run_has_ended(codes: tuple[int | None, int | None], status: Status, why: str) -> None:
    nodes = tuple(NodeState(index, False, code) for index, code in enumerate(codes))
    run = Run(RUN_ID, CONFIG, nodes, 1, 2.0)
    assert (run.status, run.why) == (status, why)
    assert summary(run)["why"] == why
    assert table([run]).rows[0][1] == (f"{status.value}, {why}" if why else status.value)


def test_a_loss_that_is_no_number_is_listed_without_one(run: Hosts) -> None:
    run[0].write(f"{FOLDER}/metrics.jsonl", '{"step": 4, "loss": null, "skipped": true, "skipped_in_row": 3}\n')
    [found] = list_runs(run)
    assert (found.last_step, found.last_loss, found.skipped_in_row) == (4, None, 3)
    assert table([found]).rows[0][-1] == "-"


def test_a_benchmark_is_listed_as_one_and_has_no_strategy(run: Hosts) -> None:
    [found] = list_runs(run)
    bench = replace(found, run_id=new_run_id(BENCHMARK))
    assert table([found, bench]).rows[0][2:4] == ("mics", "2")
    assert table([found, bench]).rows[1][2:4] == ("bench", "-")
    assert (summary(found)["strategy"], summary(bench)["strategy"]) == ("mics", None)
