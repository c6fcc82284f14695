"""The laptop's files: one command at a time changes a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from micsctl.errors import UsageError
from micsctl.home import Home, hold


def test_the_second_to_come_is_told_who_has_it(tmp_path: Path) -> None:
    lock = Home(tmp_path).cluster("sandbox", "demo").lock
    code = (
        "import sys, pathlib, micsctl.home as home\n"
        "with home.hold(pathlib.Path(sys.argv[1]), 'x'): print('in', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout
        assert other.stdout.readline() == "in\n"
        with pytest.raises(UsageError, match="busy with cluster 'demo'") as raised, hold(lock, "cluster 'demo'"):
            pass
        assert f"process {other.pid} " in raised.value.why
    finally:
        other.kill()  # a process that is killed holds nothing any more
        other.communicate(timeout=10)
    with hold(lock, "cluster 'demo'"):
        pass


def test_clusters_do_not_wait_for_each_other(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with hold(home.cluster("sandbox", "a").lock, "a"), hold(home.cluster("sandbox", "b").lock, "b"):
        pass
