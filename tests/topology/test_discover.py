"""The probe runs for real in bash on this machine; only the way to it (SSH) is left out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest

from micsctl.cluster.model import Cluster, Node
from micsctl.errors import HealthError
from micsctl.remote.host import HostError, Result
from micsctl.topology import parse, probe
from micsctl.topology.discover import CpuDevices, clock_offset_seconds, discover

from . import samples


class Local:
    """A Host that runs its commands here."""

    def __init__(self, index: int, home: Path, answer: Callable[[str], str] | None = None) -> None:
        self.index, self.name, self.home, self.answer = index, f"node {index} (i-{index})", home, answer

    def run(self, command: str, *, timeout_seconds: float = 60, check: bool = True) -> Result:
        if self.answer:
            return Result(0, self.answer(command), "")
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
        )
        if check and done.returncode:
            raise HostError(f"failed on {self.name}", done.stderr)
        return Result(done.returncode, done.stdout, done.stderr)

    def stream(self, command, on_line): ...
    def write(self, path, text, *, mode=0o600): ...
    def read(self, path): ...
    def send_folder(self, source, target): ...
    def close(self) -> None: ...


def make_cluster(*addresses: str) -> Cluster:
    nodes = tuple(Node(i, f"i-{i}", "running", address, None) for i, address in enumerate(addresses))
    now = datetime.now(UTC)
    return Cluster("c", "sandbox", "us-east-1", "us-east-1a", "p4d.24xlarge", "ubuntu", 22, now, now, nodes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With the Python that bootstrap leaves there."""
    (tmp_path / ".micsctl").mkdir()
    python = tmp_path / ".micsctl/python"
    path = shlex.quote(":".join(filter(None, sys.path)))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def installed_torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def test_this_machine_as_two_nodes(home: Path) -> None:
    cluster = make_cluster("127.77.0.10", "127.77.0.11")
    hosts = [Local(0, home), Local(1, home)]
    topology = discover(cluster, hosts, cpu_devices=CpuDevices(2, 54 << 20), network_nodes={"i-1": ("nn-1",)})
    assert [node.index for node in topology.nodes] == [0, 1]
    assert topology.devices_per_node == 2
    assert topology.device_memory_bytes == 54 << 20
    for node in topology.nodes:
        assert node.hostname == os.uname().nodename
        assert node.interface == "lo"
        assert node.cpus == len(os.sched_getaffinity(0))
        assert node.memory_bytes > 1 << 28
        assert abs(node.clock_offset_seconds) < 0.5
        assert node.versions["kernel"] == os.uname().release
        assert node.versions["python"] == sys.version.split()[0]
        assert node.versions.get("torch") == installed_torch()
    assert [node.network_nodes for node in topology.nodes] == [(), ("nn-1",)]


def test_the_probe_survives_a_machine_without_any_tool(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "timeout"):
        path = subprocess.run(["which", tool], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        (tmp_path / "bin" / tool).symlink_to(path)
    command = probe.COMMAND.replace(":/opt/amazon/efa/bin:/usr/sbin:/sbin", "")
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0
    sections = parse.sections(done.stdout)
    assert list(sections) == list(probe.SECTIONS)
    assert all(section.exit_code for section in sections.values())


def test_a_hanging_tool_hides_no_other_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = home / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nsleep 30\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    text = Local(0, home).run(probe.COMMAND.replace("timeout -k 2 20", "timeout -k 2 1")).stdout
    sections = parse.sections(text)
    assert sections["gpus"].exit_code == 124
    assert sections["links"].exit_code == 124
    assert list(sections) == list(probe.SECTIONS)
    assert sections["kernel"].exit_code == 0


def test_what_the_probe_asks_nvidia_smi(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that answers only the exact queries, through the real probe and the real parsers."""
    tools = home / "bin"
    tools.mkdir()
    query = f"--query-gpu={','.join(probe.GPU_COLUMNS)} --format=csv,nounits"
    script = f"""#!{sys.executable}
import sys
answers = {{{query!r}: {samples.GPU_CSV!r}, "topo -m": {samples.FOUR_NV12!r}}}
print(answers[" ".join(sys.argv[1:])], end="")
"""
    (tools / "nvidia-smi").write_text(script)
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    topology = discover(make_cluster("127.0.0.1"), [Local(0, home)], cpu_devices=None, network_nodes={})
    (node,) = topology.nodes
    assert len(node.devices) == 4
    assert node.nvlinks[0] == (0, 12, 12, 12)
    assert node.versions["driver"] == "550.54.15"


def test_nodes_without_gpus_are_all_named(home: Path) -> None:
    missing = samples.probe_output(gpus=("bash: nvidia-smi: command not found", 127))

    def answer(command: str) -> str:
        return f"{time.time()}" if command == probe.CLOCK else missing

    hosts = [Local(i, home, answer) for i in range(2)]
    with pytest.raises(Exception, match="2 of 2 nodes failed") as caught:
        discover(make_cluster("10.77.0.11", "10.77.0.11"), hosts, cpu_devices=None, network_nodes={})
    why = json.dumps(caught.value.why)  # type: ignore[attr-defined]
    assert "no GPU found on node 0 (i-0)" in why
    assert "no GPU found on node 1 (i-1)" in why
    assert "command not found" in why


def test_the_clock_offset_is_corrected_by_half_the_round_trip(home: Path) -> None:
    """Round trips of 4, 2 and 6 s; the node is 100 s ahead and answers half-way; the quickest try counts."""
    here = [0.0]
    trips = iter((4.0, 2.0, 6.0))
    lateness = iter((0.7, 0.0, 0.7))  # slower tries are also lopsided

    def answer(command: str) -> str:
        trip = next(trips)
        at = here[0] + trip / 2 + next(lateness)
        here[0] += trip
        return f"{at + 100:.9f}\n"

    assert clock_offset_seconds(Local(0, home, answer), now=lambda: here[0]) == pytest.approx(100.0)


def test_a_clock_that_cannot_be_read(home: Path) -> None:
    with pytest.raises(HealthError, match="clock of node 0"):
        clock_offset_seconds(Local(0, home, lambda command: "date: not found"))
