"""Set-up on a machine that lacks something, and the second time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cksum", "dirname", "grep", "id", "sed", "uname", "sudo")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout, and beside it a PATH on which there is Python but neither rsync nor apt-get."""
    (tmp_path / "checkout/.ci").mkdir(parents=True)
    for name in (".ci/setup", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    return tmp_path


def set_up(bare: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(bare / "checkout/.ci/setup")],
        env={"PATH": str(bare / "bin"), "HOME": str(bare), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_package_that_cannot_be_installed_is_one_line(bare: Path) -> None:
    refused = set_up(bare)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "install these packages" in line
    assert "rsync" in line
    assert not (bare / "checkout/.venv").exists()


def test_an_old_python_is_one_line(bare: Path) -> None:
    (bare / "bin/python3").unlink()
    refused = set_up(bare)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "Python 3.11 or newer" in line


def test_apt_is_never_used_through_sudo_without_being_asked(bare: Path) -> None:
    """An ordinary user without a terminal, with an apt and a sudo that would work."""
    log = bare / "log"
    for name, body in (("apt-get", f"echo apt >>{log}"), ("sudo", f"echo sudo >>{log}"), ("id", "echo 1000")):
        (bare / "bin" / name).unlink(missing_ok=True)
        (bare / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (bare / "bin" / name).chmod(0o755)
    assert set_up(bare).returncode == 2
    assert not log.exists()


@pytest.mark.skipif(not (ROOT / ".venv/.stamp").exists(), reason="this checkout was not set up by make")
def test_the_second_time_takes_seconds() -> None:
    subprocess.run(["bash", ROOT / ".ci/setup"], check=True, timeout=250, env=dict(os.environ))
    began = time.monotonic()
    subprocess.run(["bash", ROOT / ".ci/setup"], check=True, timeout=60, env=dict(os.environ))
    assert time.monotonic() - began < 10
