"""A sandbox of one command's own ends with it, whenever Ctrl-C comes; what was measured is not lost with the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from micsctl.cli import bench, signals
from micsctl.cli.options import Options
from micsctl.cli.own import OwnSession, everything_ends
from micsctl.cli.render import Render
from micsctl.errors import Interrupted, MicsctlError
from micsctl.home import Home
from micsctl.report.table import Table
from micsctl.sandbox import control
from micsctl.spec import Spec


@pytest.fixture
def own(tmp_path: Path) -> OwnSession:
    return OwnSession(Options(), Render(), Home(tmp_path / "own"), Spec())


def press(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C while the sandbox is stopped."""

    def stop(home: Home) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(control, "stop", stop)


def test_ctrl_c_while_the_sandbox_is_stopped_stops_the_command_afterwards(
    own: OwnSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    press(monkeypatch)
    with pytest.raises(Interrupted) as raised, everything_ends(own, "the benchmark"):
        pass
    assert raised.value.costs == "nothing is left of the benchmark; nothing costs money"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MicsctlError("no capacity")])
def test_impatience_does_not_hide_why_it_ends(
    own: OwnSession, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    press(monkeypatch, times=3)
    with pytest.raises(MicsctlError) as raised, everything_ends(own, "the demo"):
        raise error
    assert raised.value.what in ("the demo was stopped by Ctrl-C", "no capacity")


def test_programs_that_clean_up_are_not_stopped_either() -> None:
    with signals.held_back() as came:
        script = "kill -INT $$; kill -TERM $$; echo went on"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=10, check=True)
    assert (done.stdout, came) == ("went on\n", [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


@dataclass(frozen=True)
class Found:
    figure: int


def answer(folder: Path, figure: int = 7, page: str = "page") -> None:
    session: Any = OwnSession(Options(), Render(json=True, quiet=True), Home(folder), Spec())
    bench._answer(session, Found(figure), folder, page, ("well",), Table("", ("figure",), (("7",),)))


@pytest.mark.parametrize("blocked", ["report.html", "result.json"])
def test_figures_are_shown_where_the_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: str
) -> None:
    (tmp_path / blocked).mkdir()
    with pytest.raises(typer.Exit) as left:
        answer(tmp_path)
    shown = capsys.readouterr()
    assert (left.value.exit_code, json.loads(shown.out)) == (1, {"figure": 7})
    assert f"the report was not written: {tmp_path}: Is a directory; the figures are above" in shown.err


def test_a_report_that_cannot_be_written_leaves_the_older_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(tmp_path, 7, "old")
    write = Path.write_text

    def full(path: Path, text: str, **rest: Any) -> int:
        if "json" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, text, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(typer.Exit):
            answer(tmp_path, 8, "new")
    assert (tmp_path / "report.html").read_text() == "old"
    assert json.loads((tmp_path / "result.json").read_text()) == {"figure": 7}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "result.json"]


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    answer(tmp_path / "gone")
    assert (tmp_path / "gone/report.html").read_text() == "page"
