"""Hosts without SSH: the same shell commands, run by bash in a home folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from micsctl.errors import MicsctlError
from micsctl.remote.host import Result
from micsctl.topology.model import Device, NodeFacts, Topology


@dataclass
class LocalHost:
    index: int
    home: Path
    login: Mapping[str, str] = field(default_factory=dict)  # variables of the node's login environment, besides

    @property
    def name(self) -> str:
        return f"node {self.index} (i-{self.index})"

    def _popen(self, command: str) -> subprocess.Popen[str]:
        environment = {"HOME": str(self.home), "PWD": str(self.home), "PATH": os.environ["PATH"]}  # as after a login
        environment |= self.login
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["bash", "-c", command], cwd=self.home, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            text=True,
        )  # fmt: skip

    def run(self, command: str, *, timeout_seconds: float = 60, check: bool = True) -> Result:
        process = self._popen(command)
        out, err = process.communicate(timeout=timeout_seconds)
        if check and process.returncode:
            raise MicsctlError(f"{self.name}: exit code {process.returncode}", err)
        return Result(process.returncode, out, err)

    def stream(self, command: str, on_line: Callable[[str], None]) -> int:
        process = self._popen(command)
        assert process.stdout
        for line in process.stdout:
            on_line(line.rstrip("\n"))
        return process.wait(timeout=30)

    def write(self, path: str, text: str, *, mode: int = 0o600) -> None:
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def read(self, path: str) -> str | None:
        target = self.home / path
        return target.read_text() if target.exists() else None

    def send_folder(self, source: Path, target: str) -> None:
        shutil.copytree(source, self.home / target, dirs_exist_ok=True)

    def close(self) -> None: ...


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[LocalHost]]:
    """Two nodes whose `.micsctl/python` is this interpreter."""
    made = []
    for index in range(2):
        home = tmp_path / f"home{index}"
        (home / ".micsctl").mkdir(parents=True)
        wrapper = home / ".micsctl/python"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        wrapper.chmod(0o755)
        made.append(LocalHost(index, home))
    yield made
    for pid in processes_with(f"HOME={tmp_path}/home"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(setting: str) -> list[int]:
    """Processes in whose environment a variable begins like this (`NAME=value`)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if b"\0" + setting.encode() in b"\0" + path.read_bytes():
                found.append(int(path.parent.name))
    return found


def facts(index: int, *, interface: str = "lo") -> NodeFacts:
    return NodeFacts(
        index=index,
        instance_id=f"i-{index}",
        hostname=f"node{index}",
        private_ip=f"127.0.0.{index + 1}",
        interface=interface,
        devices=tuple(Device(i, "cpu", 54 << 20, None) for i in range(2)),
        nvlinks=(),
        efa_devices=(),
        cpus=2,
        memory_bytes=1 << 30,
        clock_offset_seconds=0.0,
        versions={},
        network_nodes=(),
    )


@pytest.fixture
def topology() -> Topology:
    return Topology((facts(0), facts(1)))
