"""What benchmarks refuse before they start, and how they show progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from micsctl.cli import app, bench
from micsctl.cli.render import BenchView, Render, RunView
from micsctl.cli.session import Session
from micsctl.cluster.model import Cluster, Node

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CLUSTER = Cluster("mine", "aws", "r", "z", "t", "u", 22, NOW, NOW, (Node(0, "i-0", "running", "10.0.0.1", None),))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MICSCTL_HOME", str(tmp_path / "home"))


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["micsctl", *arguments])
    with pytest.raises(SystemExit) as left:
        app.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("strategies", "--strategies", "mics,zeroo3"), "did you mean 'zero3'?"),
        (("strategies", "--sweep", "--links", "400,0"), "rates are 1 to 100000 Mbit/s"),
        (("strategies", "--model", "gpt-9t"), "--model 'gpt-9t' is no preset"),
        (("strategies", "--steps", "0"), "--steps"),
        (("strategies", "--link-mbps", "0"), "--link-mbps"),
        (("strategies", "--sweep", "--nodes", "1"), "a sweep over links needs two nodes"),
        (("strategies", "--sweep", "--strategies", "ddp"), "--sweep compares zero3 and mics only"),
        (("strategies", "--links", "400"), "--links belongs to --sweep"),
        (("traffic", "--link-mbps", "200000"), "--link-mbps"),
        (("scaling", "--sizes", "7,11,13"), "143 micro-steps"),
        (("traffic", "--strategies", ""), "unknown strategy ''"),
        (("scaling", "--sizes", "1,65"), "there are 1 to 64 nodes"),
        (("scaling", "--sizes", "two"), "'two' is no number of nodes"),
        (("scaling", "--sizes", "1" * 5000), "is no number of nodes"),
        (("scaling", "--sizes", "1", "--emulate-compute"), "one node has no hop 2"),
        (("collectives", "--nodes", "1", "--devices-per-node", "1"), "one device has no collectives"),
        (("collectives", "--output", "mics.yaml/x"), "cannot write into mics.yaml/x"),
        (("strategies", "--sweep", "--output", "mics.yaml"), "micsctl bench strategies --sweep --output FOLDER"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mics.yaml").write_text("name: mine\n")
    assert typed(monkeypatch, "bench", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (Path("home/bench")).exists()
    assert not Path("bench").exists()


def test_a_real_provider_needs_its_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mics.yaml").write_text("name: mine\nprovider: aws\n")
    monkeypatch.setattr(Session, "aws", None)
    monkeypatch.setattr("micsctl.cluster.find.find", lambda *_: None)
    assert typed(monkeypatch, "bench", "strategies", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["what"], error["next"]) == ("there is no cluster 'mine'", "micsctl up")


def test_a_cluster_that_is_up_has_its_own_nodes_and_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "running", lambda _: CLUSTER)
    assert typed(monkeypatch, "bench", "collectives", "--nodes", "2", "--link-mbps", "100") == 2
    assert "--nodes, --link-mbps: not on a cluster that is up" in capsys.readouterr().err


def test_ctrl_c_on_a_cluster_says_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def interrupted(*_: Any) -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    Path("mics.yaml").write_text("name: mine\nprovider: aws\n")
    monkeypatch.setattr(bench, "running", lambda _: CLUSTER)
    monkeypatch.setattr(Session, "hosts", interrupted)
    assert typed(monkeypatch, "bench", "collectives") == 130
    assert "cluster 'mine' goes on, and so does what it costs" in capsys.readouterr().err


def line(number: int) -> dict[str, Any]:
    return {"step": number, "step_seconds": 2.0}


def test_progress_is_a_line_each_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    view = BenchView(Render(), 2, lambda line: f"step {line['step']}")
    view.open()
    view.output("what rank 0 says")
    for number in (1, 2):
        view.metrics(line(number))
    view.close()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "  1/2  step 1\n  2/2  step 2\n")


def test_progress_is_a_bar_with_the_time_left_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("micsctl.cli.render.time.monotonic", lambda: next(clock))
    view = BenchView(Render(), 5, lambda line: f"measured {line['step']}")
    for number in (1, 2, 3):
        view.metrics(line(number))
    assert "step 3/5  4.0 s left  measured 3" in capsys.readouterr().err


def test_following_a_benchmark_without_steps_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    view = RunView(Render(), 2)
    view.metrics({"step": 1, "kind": "link"})
    view.output("TCP: 47 MB/s")
    assert capsys.readouterr().out == "TCP: 47 MB/s\n"
