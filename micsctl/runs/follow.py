"""Watch a run until it ends. It goes on without us: what we see are files on the nodes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.model import CONFIG_EXIT_CODE, SAVED_EXIT_CODE, Failure
from micsctl.runs.state import first_failure
from micsctl.runs.stop import stop

# Metrics lines are marked `M `, rank 0's own output `0 `. `tail --pid` ends with the launcher; -F, since the trainer
# puts a fresh metrics.jsonl in the place of an old one.
_FOLLOW = r"""
cd .micsctl/runs/{run_id} || exit 1
pid=$(cat pid)
until [ -f exit ] || ls ranks/*/attempt_0/0/stdout.log >/dev/null 2>&1; do
  kill -0 "$pid" 2>/dev/null || break
  sleep 0.1
done
: >>metrics.jsonl
tail -n +1 -F -s 0.2 --pid="$pid" metrics.jsonl 2>/dev/null | sed -u 's/^/M /' &
for log in ranks/*/attempt_0/0/stdout.log; do
  [ -f "$log" ] && {{ tail -n +1 -f -s 0.2 --pid="$pid" "$log" | sed -u 's/^/0 /' & }}
done
wait
"""


class Watcher(Protocol):
    """What a follower is told."""

    def metrics(self, line: dict[str, Any]) -> None: ...

    def output(self, line: str) -> None: ...


def follow(
    hosts: Sequence[Host], run_id: str, watcher: Watcher, *, poll_seconds: float = 1.0, grace_seconds: float = 15
) -> None:
    """Hand over metrics and rank 0's output until the run ends on every node.

    grace_seconds  what the other nodes get to end by themselves once one of them has failed

    Raises JobError that names the first failed rank, its node and its exit code, after ending what is left of the run;
    UsageError where the trainer refused its configuration. Ctrl-C only ends the watching.
    """
    stream_failed: list[MicsctlError] = []
    reader = threading.Thread(target=_read, args=(hosts[0], run_id, watcher, stream_failed), daemon=True)
    reader.start()
    codes = _wait_for_exit(hosts, run_id, poll_seconds, grace_seconds)
    reader.join(timeout=10)
    if any(code != 0 for code in codes):
        raise _explain(hosts, run_id, codes)
    if stream_failed:
        raise stream_failed[0]


def _read(head: Host, run_id: str, watcher: Watcher, failed: list[MicsctlError]) -> None:
    def on_line(line: str) -> None:
        mark, _, content = line.partition(" ")
        if mark == "M":
            watcher.metrics(json.loads(content))
        else:
            watcher.output(content)

    try:
        head.stream(_FOLLOW.format(run_id=run_id), on_line)
    except MicsctlError as error:
        failed.append(error)


def _wait_for_exit(hosts: Sequence[Host], run_id: str, poll_seconds: float, grace_seconds: float) -> list[int | None]:
    """Exit code per node; None for a launcher that is gone without one. One failure ends the rest after the grace."""
    folder = f".micsctl/runs/{run_id}"
    look = (
        f'if [ -f {folder}/exit ]; then cat {folder}/exit; elif kill -0 "$(cat {folder}/pid)" 2>/dev/null;'
        f" then echo running; else sleep 0.3; cat {folder}/exit 2>/dev/null || echo lost; fi"
    )
    failed_at: float | None = None
    while True:
        words = fanout.each(hosts, lambda host: host.run(look).stdout.strip())
        if "running" not in words:
            return [int(word) if word != "lost" else None for word in words]
        if any(word not in ("running", "0") for word in words):
            failed_at = failed_at if failed_at is not None else time.monotonic()
            if time.monotonic() - failed_at > grace_seconds:
                stop(hosts, run_id, grace_seconds=5)
        time.sleep(poll_seconds)


def _explain(hosts: Sequence[Host], run_id: str, codes: Sequence[int | None]) -> MicsctlError:
    failure = first_failure(hosts, run_id)
    logs = f"micsctl logs {run_id}"
    if failure is None:
        gone = [host.name for host, code in zip(hosts, codes, strict=True) if code is None]
        bad = [f"{host.name}: exit code {code}" for host, code in zip(hosts, codes, strict=True) if code]
        why = f"the launcher was killed on {', '.join(gone)}" if gone else "\n".join(bad)
        return JobError(f"run {run_id} failed", why, next=logs)
    if failure.exit_code == CONFIG_EXIT_CODE:
        return UsageError(f"run {run_id} was refused by the trainer", failure.last_lines, next="edit mics.yaml")
    if failure.exit_code == SAVED_EXIT_CODE:
        why = "it was asked to stop and saved a checkpoint"
        return JobError(f"run {run_id} was stopped", why, next=f"micsctl launch --resume {run_id}")
    return JobError(
        f"run {run_id} failed: rank {failure.rank} on {failure.node} {how_it_ended(failure)}",
        failure.last_lines,
        next=f"{logs} --rank {failure.rank}   or   micsctl launch --resume {run_id}",
    )


def how_it_ended(failure: Failure) -> str:
    """In words: "was killed by SIGKILL (exit code -9; often the machine ran out of memory)"."""
    if failure.exit_code >= 0:
        return f"ended with exit code {failure.exit_code}"
    try:
        name = signal.Signals(-failure.exit_code).name
    except ValueError:
        name = f"signal {-failure.exit_code}"
    hint = "; often the machine ran out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name} (exit code {failure.exit_code}{hint})"
