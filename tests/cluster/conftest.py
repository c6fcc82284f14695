from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from micsctl.aws.inventory import resources
from micsctl.aws.session import Aws, connect
from micsctl.aws.settings import AwsSettings
from micsctl.cluster.down import Down, down
from micsctl.cluster.model import Cluster
from micsctl.cluster.up import up
from micsctl.home import ClusterFiles
from micsctl.remote.host import Host, Result
from micsctl.spec import parse


@dataclass
class Recorder:
    """Progress that remembers."""

    phases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def note(self, text: str) -> None:
        self.notes.append(text)


class Emulator:
    """The child process of emulator.py."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process, self.endpoint = process, f"http://127.0.0.1:{port}"

    def fault(self, action: str, code: str, **more: Any) -> None:
        self._ask({"fault": {"action": action, "code": code, **more}})

    def clear(self) -> None:
        """No faults, no terminated instances."""
        self._ask({"clear": True})

    def end(self, instance_id: str) -> None:
        """The instance shuts itself down."""
        self._ask({"end": instance_id})

    def resources(self) -> list[str]:
        return self._ask({})

    def _ask(self, request: dict[str, Any]) -> list[str]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def emulator_process() -> Iterator[Emulator]:
    script = Path(__file__).with_name("emulator.py")
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield Emulator(process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def emulated_aws(emulator_process: Emulator) -> Aws:
    return connect(
        AwsSettings(
            region="us-east-1",
            endpoint_url=emulator_process.endpoint,
            access_key="testing",
            secret_key="testing",
            poll_seconds=0.05,
            caller_cidr="203.0.113.7/32",
        )
    )


@pytest.fixture
def aws(emulated_aws: Aws) -> Aws:
    return emulated_aws


@pytest.fixture
def emulator(emulator_process: Emulator, aws: Aws, tmp_path: Path) -> Iterator[Emulator]:
    """No faults, and nothing left by a test that failed before."""
    emulator_process.clear()
    if emulator_process.resources():
        down(aws, "demo", ClusterFiles(tmp_path / "none"), report=Recorder())
    yield emulator_process
    emulator_process.clear()


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    return ClusterFiles(tmp_path / "clusters" / "demo")


@pytest.fixture
def report() -> Recorder:
    return Recorder()


@dataclass
class FakeHost:
    """A node whose files are a dictionary; an exception in it is raised when the file is read."""

    index: int
    files: dict[str, str | Exception | None] = field(default_factory=lambda: {".micsctl/ready": "ok\n"})

    @property
    def name(self) -> str:
        return f"node {self.index}"

    def read(self, path: str) -> str | None:
        content = self.files.get(path)
        if isinstance(content, Exception):
            raise content
        return content

    def write(self, path: str, text: str, *, mode: int = 0o600) -> None:
        self.files[path] = text

    def run(self, command: str, *, timeout_seconds: float = 60, check: bool = True) -> Result:
        return Result(0, "installing torch\n", "")

    def close(self) -> None:
        pass


OpenHosts = Callable[[Cluster, ClusterFiles], AbstractContextManager[Sequence[Host]]]


@pytest.fixture
def fake_host() -> type[FakeHost]:
    return FakeHost


@pytest.fixture
def open_hosts_with() -> Callable[[dict[int, dict[str, Any]]], OpenHosts]:
    """Every node is ready but for the files given by its index; like the real opener it needs key and host keys."""

    def make(files_of_node: dict[int, dict[str, Any]]) -> OpenHosts:
        @contextmanager
        def open_hosts(cluster: Cluster, files: ClusterFiles) -> Iterator[Sequence[Host]]:
            assert files.key.stat().st_mode & 0o777 == 0o600
            known = files.known_hosts.read_text()
            assert all(node.private_ip in known for node in cluster.nodes)
            hosts: list[Any] = [FakeHost(node.index) for node in cluster.nodes]
            for host in hosts:
                host.files |= files_of_node.get(host.index, {})
            yield hosts

        return open_hosts

    return make


@pytest.fixture
def open_hosts(open_hosts_with: Callable[[dict[int, dict[str, Any]]], OpenHosts]) -> OpenHosts:
    return open_hosts_with({})


@pytest.fixture
def bring_up(aws: Aws, files: ClusterFiles, report: Recorder, open_hosts: OpenHosts) -> Callable[..., Cluster]:
    """`up` of two nodes, or of `cluster` (a flow mapping for mics.yaml)."""

    def call(cluster: str = "{nodes: 2}", **more: Any) -> Cluster:
        spec = parse(f"{{name: demo, provider: sandbox, cluster: {cluster}}}")
        defaults = {"aws": aws, "files": files, "report": report, "open_hosts": open_hosts}
        return up(spec=spec, **(defaults | more))

    return call


@pytest.fixture
def bring_down(aws: Aws, files: ClusterFiles, report: Recorder) -> Callable[..., Down]:
    return lambda **more: down(aws, "demo", files, report=report, **more)


@pytest.fixture
def kinds(aws: Aws) -> Callable[[], dict[str, int]]:
    """How many resources of each kind carry the cluster's tag."""
    return lambda: dict(Counter(resource.kind for resource in resources(aws, "demo")))
