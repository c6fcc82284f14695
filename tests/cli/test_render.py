"""What the user sees, and what a pipe reads."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from micsctl.cli.render import Render, RunView, plain
from micsctl.cluster.model import Cluster, Node
from micsctl.errors import PartialError
from micsctl.report.table import Table

TABLE = Table("runs", ("run", "step"), (("a", "1"), ("bbb", "10")), frozenset({"step"}), "two runs")


def test_tables_are_aligned_and_plain_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    Render().table(TABLE)
    assert capsys.readouterr().out == "runs\nrun  step\na       1\nbbb    10\ntwo runs\n\n"


def test_json_is_one_document_and_tables_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    render = Render(json=True)
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    cluster = Cluster("demo", "sandbox", "r", "z", "t", "u", 22, moment, moment, (Node(0, "i", "running", "ip", None),))
    render.table(TABLE)
    render.result(cluster, TABLE, text="hello")
    read = json.loads(capsys.readouterr().out)
    assert read["nodes"] == [
        {"index": 0, "instance_id": "i", "state": "running", "private_ip": "ip", "public_ip": None}
    ]
    assert read["created_at"] == "2026-01-02T00:00:00+00:00"


def test_an_error_has_four_parts(capsys: pytest.CaptureFixture[str]) -> None:
    error = PartialError("down stopped", "line one\nline two", costs="1 node runs, $22/h", next="micsctl down")
    Render().error(error)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "micsctl: down stopped", "  line one", "  line two", "1 node runs, $22/h", "next: micsctl down",
    ]  # fmt: skip
    assert captured.out == ""
    Render(json=True).error(error)
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 6


def test_quiet_keeps_results_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    render = Render(quiet=True)
    render.note("chatter")
    with render.phase("work"):
        pass
    render.result({}, text="answer")
    render.error(PartialError("broken"))
    captured = capsys.readouterr()
    assert captured.out == "answer\n"
    assert captured.err == "micsctl: broken\n"


def test_a_loss_that_is_no_number_is_valid_json() -> None:
    assert json.dumps(plain({"loss": float("nan"), "norm": float("inf"), "step": 1.5})) == (
        '{"loss": null, "norm": null, "step": 1.5}'
    )


def test_the_time_that_is_left_fits_a_run_that_was_joined_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run begins at step 11, and `logs -f` gets all steps so far at once."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = RunView(Render(), 20)
    for step in (11, 12):
        view.metrics({"step": step, "step_seconds": 2.0})
    assert "step 12/20  16 s left" in capsys.readouterr().err


def test_plain_knows_every_value_we_hold() -> None:
    json.dumps(plain({"a": (1, {2}), "when": datetime.now(UTC), "table": TABLE}))


def test_a_phase_that_an_error_leaves_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PartialError), Render().phase("start"):
        raise PartialError("broken")
    assert capsys.readouterr().err.split() == ["start", "failed"]


def test_what_a_phase_waits_for_is_indented_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    render = Render()
    with render.phase("start"):
        for ready in (0, 0, 0, 1):
            render.note(f"{ready} of 2 ready")
    render.note("0 of 2 ready")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["    0 of 2 ready", "    1 of 2 ready"]
    assert lines[2].split()[0] == "start"
    assert lines[3] == "0 of 2 ready"


def test_on_a_terminal_titles_are_not_wrapped_and_brackets_are_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    title = "a title much wider than its table, micsctl[report]"
    Render().table(Table(title, ("a",), (("[bold]",),)))
    shown = capsys.readouterr().out
    assert title in shown
    assert "[bold]" in shown


def test_a_table_of_keys_and_values_has_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    Render().table(Table("plan", ("", " "), (("p", "2"),)))
    assert capsys.readouterr().out == "plan\np  2\n\n"


def test_the_bar_says_that_it_waits_and_that_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = RunView(Render(), 1)
    view.open()
    assert "step 0/1  waiting for the first step" in capsys.readouterr().err
    view.output("a line of the log")
    shown = capsys.readouterr()
    assert shown.out == "a line of the log\n"
    assert shown.err.endswith("step 0/1  waiting for the first step")  # drawn again below the line
    view.metrics({"step": 1, "step_seconds": 2.0})
    assert "step 1/1  ending" in capsys.readouterr().err


def test_the_bar_keeps_the_last_validation_loss_and_counts_skipped_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = RunView(Render(), 9)
    view.metrics({"step": 1, "step_seconds": 2.0, "skipped": True, "validation_loss": 3.25})
    view.metrics({"step": 2, "step_seconds": 2.0, "skipped": False})
    assert capsys.readouterr().err.endswith("step 2/9  14 s left  validation loss 3.2500  1 skipped")
