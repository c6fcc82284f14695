"""Watch a run until it ends. It goes on without us: what we see are files on the nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.model import (
    CONFIG_EXIT_CODE,
    ENDED_EXIT_CODE,
    EXIT_WORDS,
    SAVED_EXIT_CODE,
    STALLED_EXIT_CODE,
    Failure,
    signal_name,
)
from micsctl.runs.shell import ALIVE, LOGS
from micsctl.runs.state import first_failure
from micsctl.runs.stop import stop

# Metrics lines are marked `M `, rank 0's own output `0 `. Not by sed: a line that a kill cut short would run into the
# next one.
_FOLLOW = (
    LOGS
    + r"""
marked() { while IFS= read -r line || [ -n "$line" ]; do printf '%s %s\n' "$1" "$line"; done; }
wait_for_log 0
: >>metrics.jsonl
options=$(going_on)
tail -n +1 $options metrics.jsonl 2>/dev/null | marked M &
log=$(log_of 0)
[ -f "$log" ] && { tail -n +1 $options "$log" | marked 0 & }
wait
"""
)
_LOOK = (
    ALIVE
    + r"""
if [ -f exit ]; then cat exit; elif alive; then echo running; else sleep 0.3; cat exit 2>/dev/null || echo lost; fi
"""
)


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
    UsageError where the trainer refused its configuration; HostError or FanoutError where nodes cannot be asked any
    more; what the watcher raises. Ctrl-C only ends the watching.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="follow")
    try:
        reading = pool.submit(_read, hosts[0], run_id, watcher)
    finally:  # Ctrl-C while the thread starts would leave it waiting for work, and us for it
        pool.shutdown(wait=False)
    codes = _wait_for_exit(hosts, run_id, reading, poll_seconds, grace_seconds)
    wait([reading], timeout=10)
    if any(code != 0 for code in codes):
        raise _explain(hosts, run_id, codes)
    if lost := _lost(reading):
        watcher.output(f"not all output was seen: {lost.what}")


def _read(head: Host, run_id: str, watcher: Watcher) -> None:
    def on_line(line: str) -> None:
        mark, _, content = line.partition(" ")
        if mark == "0":
            watcher.output(content)
        elif content.endswith("}"):  # the last line may be cut short by a kill
            watcher.metrics(json.loads(content))

    head.stream(f"cd .micsctl/runs/{run_id} || exit 1\n{_FOLLOW}", on_line)


def _lost(reading: Future[None]) -> MicsctlError | None:
    """Why the reading ended early, if it did. What is no MicsctlError is raised: a bug, or our own output is closed."""
    error = reading.exception() if reading.done() else None
    if error is None or isinstance(error, MicsctlError):
        return error
    raise error


def _wait_for_exit(
    hosts: Sequence[Host], run_id: str, reading: Future[None], poll_seconds: float, grace_seconds: float
) -> list[int | None]:
    """Exit code per node; None for a launcher that is gone without one. One failure ends the rest after the grace."""
    look = f"cd .micsctl/runs/{run_id} 2>/dev/null || {{ echo lost; exit; }}\n{_LOOK}"
    failed_at: float | None = None
    while True:
        words = fanout.each(hosts, lambda host: host.run(look).stdout.strip())
        if "running" not in words:
            return [int(word) if word != "lost" else None for word in words]
        if any(word not in ("running", "0") for word in words):
            failed_at = failed_at if failed_at is not None else time.monotonic()
            if time.monotonic() - failed_at > grace_seconds:
                stop(hosts, run_id, grace_seconds=5)
        _lost(reading)
        time.sleep(poll_seconds)


def _explain(hosts: Sequence[Host], run_id: str, codes: Sequence[int | None]) -> MicsctlError:
    failure = first_failure(hosts, run_id)
    logs = f"micsctl logs {run_id}"
    if set(codes) <= {0, ENDED_EXIT_CODE}:
        said = failure.last_lines if failure and failure.exit_code == ENDED_EXIT_CODE else ""
        return JobError(f"run {run_id} was stopped", said or "it had nothing to save yet", next="micsctl launch")
    if failure is None:
        gone = [host.name for host, code in zip(hosts, codes, strict=True) if code is None]
        bad = [f"{host.name}: exit code {code}" for host, code in zip(hosts, codes, strict=True) if code]
        why = f"the launcher was killed on {', '.join(gone)}" if gone else "\n".join(bad)
        return JobError(f"run {run_id} failed", why, next=logs)
    if failure.exit_code == CONFIG_EXIT_CODE:
        hint = "micsctl launch, without --resume" if "resume_from" in failure.last_lines else "edit mics.yaml"
        return UsageError(f"run {run_id} was refused by the trainer", failure.last_lines, next=hint)
    again = f"micsctl launch --resume {run_id}"
    if failure.exit_code == SAVED_EXIT_CODE:
        why = failure.last_lines or "it was asked to stop"
        return JobError(f"run {run_id} was stopped and saved a checkpoint", why, next=again)
    if failure.exit_code in EXIT_WORDS:
        what = f"run {run_id} has ended: {EXIT_WORDS[failure.exit_code]}"
        stacks = f"micsctl exec cat .micsctl/runs/{run_id}/stall/rank-*.txt   (stacks)   or   "
        first = stacks if failure.exit_code == STALLED_EXIT_CODE else ""
        return JobError(what, failure.last_lines, next=first + again)
    return JobError(
        f"run {run_id} failed: rank {failure.rank} on {failure.node} {how_it_ended(failure)}",
        failure.last_lines,
        next=f"{logs} --rank {failure.rank}   or   {again}",
    )


def how_it_ended(failure: Failure) -> str:
    """In words: "was killed by SIGKILL (exit code -9; often the machine ran out of memory)"."""
    if failure.exit_code >= 0:
        return f"ended with exit code {failure.exit_code}"
    name = signal_name(-failure.exit_code)
    hint = "; often the machine ran out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name} (exit code {failure.exit_code}{hint})"
