from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from micsctl.errors import ExitCode, HealthError
from micsctl.remote import fanout
from micsctl.remote.host import HostError


class FakeHost:
    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"node {index} (i-{index})"
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()

    def run(self, command, *, timeout_seconds=60, check=True): ...
    def stream(self, command, on_line): ...
    def write(self, path, text, *, mode=0o600): ...
    def read(self, path): ...
    def send_folder(self, source: Path, target: str): ...


def hosts(number: int) -> list[FakeHost]:
    return [FakeHost(i) for i in range(number)]


def test_results_keep_the_order() -> None:
    def slow_first(host: FakeHost) -> int:
        time.sleep(0.05 * (3 - host.index))
        return host.index

    assert fanout.each(hosts(4), slow_first) == [0, 1, 2, 3]
    assert fanout.each([], slow_first) == []


def test_no_more_than_at_most_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def count(host: FakeHost) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    fanout.each(hosts(12), count, at_most=3)
    assert most == 3


def test_every_failing_node_is_named_and_the_rest_is_done() -> None:
    done = []

    def fail_odd(host: FakeHost) -> None:
        if host.index % 2:
            raise HealthError(f"no GPU found on {host.name}", "nvidia-smi says: no devices", next="look")
        done.append(host.index)

    with pytest.raises(fanout.FanoutError) as caught:
        fanout.each(hosts(5), fail_odd)
    error = caught.value
    assert error.what == "2 of 5 nodes failed"
    assert "node 1 (i-1)" in error.why
    assert "node 3 (i-3)" in error.why
    assert "nvidia-smi says: no devices" in error.why
    assert error.next == "look"
    assert error.exit_code == ExitCode.HEALTH
    assert [name for name, _ in error.errors] == ["node 1 (i-1)", "node 3 (i-3)"]
    assert sorted(done) == [0, 2, 4]


def test_a_single_failure_is_raised_as_it_is() -> None:
    def fail_one(host: FakeHost) -> None:
        if host.index == 1:
            raise HostError(f"cannot reach {host.name}")

    with pytest.raises(HostError, match="cannot reach node 1"):
        fanout.each(hosts(3), fail_one)


def test_a_bug_is_not_dressed_up() -> None:
    def bug(host: FakeHost) -> None:
        raise HostError("expected") if host.index == 0 else KeyError("bug")

    with pytest.raises(KeyError):
        fanout.each(hosts(2), bug)


def test_ctrl_c_stops_cleanly() -> None:
    """Waiting calls end because their host is closed; calls that have not begun never begin."""
    nodes, begun = hosts(4), []

    def wait(host: FakeHost) -> None:
        begun.append(host.index)
        if not host.closed.wait(20):
            raise AssertionError("not closed")

    main = threading.main_thread().ident
    assert main
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fanout.each(nodes, wait, at_most=2)
    assert time.monotonic() - began < 5
    assert sorted(begun) == [0, 1]


def test_ctrl_c_while_a_thread_starts_leaves_no_thread(
    interrupted_as_threads_start: Callable[[Callable[[], object]], None],
) -> None:
    interrupted_as_threads_start(lambda: fanout.each(hosts(2), lambda host: host.index))
