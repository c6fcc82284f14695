"""Standard streams that are closed, full, or nobody reads; and folders that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MICSCTL = Path(sys.executable).with_name("micsctl")


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = line.replace("micsctl", str(MICSCTL))
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_closed_stream_is_no_error(streams: str, tmp_path: Path) -> None:
    done = shell(f"micsctl plan {streams}", tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("flag", ["", "--json"])
def test_output_that_cannot_be_written_is_explained(flag: str, tmp_path: Path) -> None:
    done = shell(f"micsctl plan {flag} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "micsctl: cannot write to standard output\n  No space left on device\n"


def test_an_error_keeps_its_exit_code_where_it_cannot_be_shown(tmp_path: Path) -> None:
    assert shell("micsctl plan -n A_B 2>/dev/full", tmp_path).returncode == 2


def test_a_reader_that_has_enough_is_no_fault(tmp_path: Path) -> None:
    done = shell("micsctl plan | true", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    done = shell("mkdir gone; cd gone; rmdir ../gone; micsctl plan", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("micsctl: the current folder does not exist any more\n")


@pytest.mark.parametrize("command", ["up", "demo --output .", "sandbox status"])
def test_a_home_that_cannot_be_used_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = shell(f"MICSCTL_HOME={tmp_path}/file/home micsctl {command}", tmp_path)
    assert done.returncode == 2
    assert f"micsctl: cannot use the folder {tmp_path}/file/home" in done.stderr
    assert done.stderr.endswith("next: set MICSCTL_HOME to a folder of yours\n")
