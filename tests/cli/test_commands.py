"""What commands do with a cluster, in this process: the cluster and its nodes are stand-ins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from mics.config import ProfileConfig, RunConfig, TrainConfig

from micsctl.cli import app, clusters, demo, runs
from micsctl.cli.options import Options, with_flags
from micsctl.cli.session import Session
from micsctl.cluster.model import Cluster, Node
from micsctl.errors import Interrupted, UsageError
from micsctl.remote.host import HostError, Result
from micsctl.runs.model import Run

RESOLVED: dict[str, Any] = {
    "partition": 2,
    "hierarchical": False,
    "micro_batch": 1,
    "precision": "fp32",
    "checkpointing": "none",
    "reshard_after_forward": True,
}
NOW = datetime(2026, 1, 2, tzinfo=UTC)
NODES = tuple(Node(i, f"i-{i}", "running", f"10.0.0.{i}", "192.0.2.1" if i == 0 else None) for i in range(3))
CLUSTER = Cluster("demo", "sandbox", "r", "z", "t", "ubuntu", 22, NOW, NOW, NODES)
TRAIN = TrainConfig(**RESOLVED)
RUN = Run("0101-000000-mics-aaaa", RunConfig("0101-000000-mics-aaaa", TRAIN, 3, 2), (), None, None)


class FakeHost:
    def __init__(self, node: Node) -> None:
        self.index, self.name = node.index, node.name
        self.commands: list[str] = []

    def run(self, command: str, **_: Any) -> Result:
        self.commands.append(command)
        return Result(3 if self.index == 1 else 0, f"{command}\n", "")

    def close(self) -> None: ...


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeHost]:
    """The nodes of CLUSTER, which every command in this test finds."""
    made = [FakeHost(node) for node in NODES]

    @contextmanager
    def opened(self: Session, cluster: Cluster) -> Iterator[list[FakeHost]]:
        yield made

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MICSCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Session, "cluster", lambda self: CLUSTER)
    monkeypatch.setattr(Session, "hosts", opened)
    monkeypatch.setattr("micsctl.runs.state.find_run", lambda hosts, run_id: RUN)
    return made


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the whole command line."""
    monkeypatch.setattr(sys, "argv", ["micsctl", *arguments])
    with pytest.raises(SystemExit) as left:
        app.main()
    return int(left.value.code or 0)


def test_exec_hands_options_on_and_names_the_node_that_failed(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "exec", "nvidia-smi", "topo", "-m", "-n", "--json") == 8
    assert hosts[2].commands == ["nvidia-smi topo -m -n --json"]
    shown = capsys.readouterr()
    assert "2: nvidia-smi topo -m -n --json" in shown.out
    assert "exit code 3 on node 1 (i-1)" in shown.err


def test_exec_as_json_is_one_document(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, "exec", "--json", "true") == 8
    assert [(a["node"], a["exit_code"]) for a in json.loads(capsys.readouterr().out)] == [(0, 0), (1, 3), (2, 0)]


def test_ssh_finds_the_node_by_its_index_and_hands_options_on(
    hosts: list[FakeHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is gone: what stands second in the list is node 2."""
    started: list[list[str]] = []
    monkeypatch.setattr(Session, "cluster", lambda self: replace(CLUSTER, nodes=(NODES[0], NODES[2])))
    monkeypatch.setattr(os, "execvp", lambda file, argv: started.append(argv))
    folder = tmp_path / "home/clusters/sandbox/demo"
    folder.mkdir(parents=True)
    assert typed(monkeypatch, "ssh", "2", "fi_info", "-p", "efa") == 2  # this laptop has no key of the cluster
    for name in ("id_ed25519", "known_hosts"):
        (folder / name).touch()
    assert typed(monkeypatch, "ssh", "2", "fi_info", "-p", "efa") == 0
    assert started[0][-4:] == ["10.0.0.2", "fi_info", "-p", "efa"]
    with pytest.raises(UsageError, match="no node 1"):
        clusters.ssh(Options(), 1)


def test_logs_as_json_are_one_document(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank_log(_hosts: object, _run: Run, rank: int, on_line: Callable[[str], None], *, follow: bool) -> None:
        on_line("one")
        on_line("two")

    monkeypatch.setattr("micsctl.runs.logs.rank_log", rank_log)
    runs.logs(Options(json=True), rank=3)
    assert json.loads(capsys.readouterr().out) == {"run_id": RUN.run_id, "rank": 3, "lines": ["one", "two"]}
    monkeypatch.setattr("micsctl.runs.follow.follow", lambda hosts, run_id, view: view.output("one"))
    runs.logs(Options(json=True), follow=True)
    assert json.loads(capsys.readouterr().out) == {"run_id": RUN.run_id, "exit_code": 0}


@pytest.mark.parametrize(
    ("broken", "explained"),
    [(KeyboardInterrupt(), Interrupted), (BrokenPipeError(), Interrupted), (HostError("lost node 1"), HostError)],
)
def test_when_the_watching_ends_the_run_and_its_costs_are_named(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch, broken: BaseException, explained: type[Exception]
) -> None:
    def follow(*_: object) -> None:
        raise broken

    monkeypatch.setattr("micsctl.runs.follow.follow", follow)
    with pytest.raises(explained) as raised:
        runs.logs(Options(), follow=True)
    assert "goes on" in raised.value.costs  # type: ignore[attr-defined]
    assert f"micsctl stop {RUN.run_id}" in raised.value.next  # type: ignore[attr-defined]


@pytest.mark.parametrize("flags", [(), ("-v",)])
def test_a_fault_of_ours_is_one_document_too(
    hosts: list[FakeHost],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
) -> None:
    def broken(self: Session) -> Cluster:
        raise KeyError("oops")

    monkeypatch.setattr(Session, "cluster", broken)
    assert typed(monkeypatch, "runs", "--json", *flags) == 1
    shown = capsys.readouterr()
    assert "internal error: KeyError" in json.loads(shown.out)["error"]["what"]
    assert ("Traceback" in shown.err) == bool(flags)


def test_a_ttl_that_is_no_duration_is_usage(hosts: list[FakeHost]) -> None:
    with pytest.raises(UsageError) as raised:
        clusters.up(Options(), ttl="soon")
    assert raised.value.why.startswith("cluster.ttl: give a duration such as")


def test_the_demo_asks_for_all_that_is_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICSCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("micsctl.cli.own.find_spec", lambda module: None)
    with pytest.raises(UsageError) as raised:
        demo.demo(Options(), tmp_path / "demo")
    assert raised.value.why == "missing: torch (extra trainer), moto (extra sandbox), matplotlib (extra report)"
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("options", "hint", "expected"),
    [
        (Options(), "micsctl up", "micsctl up"),
        (
            Options(name="x"),
            "micsctl logs -f r   or   micsctl stop r",
            "micsctl logs -n x -f r   or   micsctl stop -n x r",
        ),
        (Options(name="x"), "micsctl down -n x", "micsctl down -n x"),
        (Options(name="x"), "micsctl init", "micsctl init"),
        (Options(config=Path("a.yaml")), "micsctl up", "micsctl up -c a.yaml"),
        (
            Options(config=Path("a.yaml")),
            "micsctl bench traffic --nodes 4",
            "micsctl bench traffic -c a.yaml --nodes 4",
        ),
    ],
)
def test_hints_mean_the_same_cluster(options: Options, hint: str, expected: str) -> None:
    assert with_flags(hint, options) == expected


def test_launch_sends_the_users_model_along_and_records_the_steps_that_flags_name(
    hosts: list[FakeHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`own.py` lies beside mics.yaml, which is found from a folder below."""
    (tmp_path / "own.py").touch()
    (tmp_path / "mics.yaml").write_text("train: {model: 'own:make', partition: 2, micro_batch: 1}\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    seen: dict[str, Any] = {}

    def prepare(train: TrainConfig, *_: object, **__: object) -> RunConfig:
        seen["train"] = train
        return RUN.config

    monkeypatch.setattr(Session, "discover", lambda *_: None)
    monkeypatch.setattr(Session, "findings", lambda *_: ())
    monkeypatch.setattr("micsctl.runs.prepare.prepare", prepare)
    monkeypatch.setattr("micsctl.runs.launch.start", lambda *_, **named: seen.update(named))
    assert typed(monkeypatch, "launch", "--detach", "--profile-steps", "5:3", "--profile-memory") == 0
    assert RUN.run_id in capsys.readouterr().out
    assert seen["own_code"] == tmp_path / "own.py"
    assert seen["train"].profile == ProfileConfig(5, 3, memory=True)
    assert typed(monkeypatch, "launch", "--profile-steps", "soon") == 2
    assert "--profile-steps 10:3" in capsys.readouterr().err
