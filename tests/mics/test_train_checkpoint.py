"""Checkpoints on disk: a killed save never hurts the last good one."""

import json
from pathlib import Path

import pytest
from mics.checkpoint import MARK, Progress, _complete, is_whole, newest_whole, to_resume
from mics.errors import RunRefusedError
from mics.shapes import ModelShape

SHAPE = ModelShape(hidden=12, layers=2, heads=3)


class KilledError(Exception):
    """Stands for kill -9 at this point."""


def write_files(partial, content="weights"):
    partial.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (partial / name).write_text(content)


def saved(folder, step, content="weights"):
    partial, target = folder / f"step-{step}.partial", folder / f"step-{step}"
    write_files(partial, content)
    _complete(partial, target, Progress(step, 8 * step), SHAPE)
    return target


def test_the_newest_whole_checkpoint_is_found_by_its_number(tmp_path):
    assert newest_whole(tmp_path) is None
    for step in (2, 10, 9):
        saved(tmp_path, step)
    assert newest_whole(tmp_path) == tmp_path / "step-10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-2", "step-9"]
    assert json.loads((tmp_path / "step-10" / MARK).read_text())["samples"] == 80


@pytest.mark.parametrize("damage", ["no mark", "half a mark", "file cut", "file gone", "only files"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    good, bad = saved(tmp_path, 1), saved(tmp_path, 2)
    match damage:
        case "no mark":
            (bad / MARK).unlink()
        case "half a mark":
            (bad / MARK).write_text((bad / MARK).read_text()[:30])
        case "file cut":
            (bad / "__1_0.distcp").write_text("wei")
        case "file gone":
            (bad / ".metadata").unlink()
        case "only files":
            write_files(tmp_path / "step-3.partial")
            (bad / MARK).unlink()
    assert not is_whole(bad)
    assert newest_whole(tmp_path) == good


@pytest.mark.parametrize("renames_before_the_kill", [0, 1])
def test_a_save_killed_while_it_replaces_the_same_step_loses_nothing(tmp_path, monkeypatch, renames_before_the_kill):
    saved(tmp_path, 1, "older")
    saved(tmp_path, 2, "first attempt")
    renames, real = [], Path.rename

    def rename(self, target):
        if len(renames) == renames_before_the_kill:
            raise KilledError
        renames.append(target)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KilledError):
        saved(tmp_path, 2, "second attempt")
    monkeypatch.undo()
    found = newest_whole(tmp_path)
    assert json.loads((found / MARK).read_text())["step"] == 2
    assert "attempt" in (found / "__0_0.distcp").read_text()


def test_resume_takes_a_checkpoint_or_the_newest_below_a_folder(tmp_path):
    old, new = saved(tmp_path / "run", 1), saved(tmp_path / "run", 2)
    assert to_resume(old, SHAPE) == old
    assert to_resume(tmp_path / "run", SHAPE) == new
    with pytest.raises(RunRefusedError, match="holds no whole checkpoint"):
        to_resume(tmp_path / "nothing", SHAPE)
    with pytest.raises(RunRefusedError, match=r"another model than train\.model: hidden 12 instead of 24"):
        to_resume(old, ModelShape(hidden=24, layers=2, heads=3))
