"""Runs that stand still, with real ranks: who is named, what is left behind, how the processes end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

LAUNCHER = Path(__file__).with_name("stall_launcher.py")
SCENARIOS = ("well", "sleeping", "stopped", "host-stopped", "left", "never-came")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """ended(scenario): (exit codes by rank, lines of stderr, folder). All scenarios at once; limit 3 s."""
    folder = tmp_path_factory.mktemp("stalls")
    process = subprocess.Popen(
        [sys.executable, str(LAUNCHER), ",".join(SCENARIOS), "3", "90", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes = json.loads(output.splitlines()[-1])
    return lambda s: (codes[s], (folder / s / "stderr").read_text().splitlines(), folder / s)


def said(lines):
    return [line for line in lines if line.startswith("mics: ")]


def test_a_run_that_goes_well_is_left_alone(ended):
    codes, lines, folder = ended("well")
    assert (codes, said(lines)) == ([0, 0, 0, 0], [])
    assert list(folder.glob("*/stall/*")) == []
    beats = [json.loads(file.read_text()) for file in sorted(folder.glob("*/beats/*.json"))]
    assert [beat["rank"] for beat in beats] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("scenario", "codes", "line"),
    [
        ("sleeping", [74] * 4, r"in step 3: rank 2 \(i-1\) has not left data; the others wait in hop 1 across"),
        ("stopped", [74, 74, -9, 74], r"in step 3: rank 2 \(i-1\) is silent; the others wait in hop 1 across"),
        ("left", [74, 74, -9, 74], r"in step 3: rank 2 \(i-1\) has ended; the others wait in hop 1 across"),
        ("never-came", [74, 74, -9, 74], r"at the start: rank 2 \(i-1\) is silent; the others wait in start"),
    ],
)
def test_one_line_names_the_rank_that_the_others_wait_for(ended, scenario, codes, line):
    found, lines, folder = ended(scenario)
    assert found == codes, lines
    (spoken,) = said(lines)
    assert re.fullmatch(rf"mics: stalled for [345] s {line}", spoken)
    for node in (0, 1):
        assert f"mics: {(folder / str(node) / 'stall' / 'line.txt').read_text()}" == f"{spoken}\n"


def test_every_rank_that_can_leaves_its_stacks(ended):
    _, _, folder = ended("stopped")
    stacks = {file.stem: file.read_text() for file in folder.glob("*/stall/rank-*.txt")}
    assert sorted(stacks) == ["rank-0", "rank-1", "rank-3"]
    assert all("in all_reduce" in text and "in loop" in text for text in stacks.values())


def test_without_the_store_each_node_tells_what_it_sees(ended):
    """Rank 0 serves the store in these runs (under torchrun its agent does), and is stopped."""
    codes, lines, folder = ended("host-stopped")
    assert codes == [-9, 74, 74, 74], lines
    alone = r"\(seen from i-{} alone: the store on i-0 does not answer\)"
    by_node = [(folder / str(node) / "stall" / "line.txt").read_text() for node in (0, 1)]
    assert re.search(rf"rank 0 \(i-0\) is silent; the others wait in hop 1 across {alone.format(0)}$", by_node[0])
    assert re.search(rf"all ranks are in hop 1 across and none is behind {alone.format(1)}$", by_node[1])
    assert sorted(said(lines)) == sorted(f"mics: {line.strip()}" for line in by_node)
