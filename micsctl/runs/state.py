"""What the run folders on the nodes say. One remote command a node, whatever the number of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mics.config import RunConfig

from micsctl.errors import UsageError
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.model import Failure, NodeState, Run

# One line of JSON a run. The launcher is alive when its pid still runs this run's start.sh (pids are reused).
_LIST = r"""
cd .micsctl/runs 2>/dev/null || exit 0
for id in */; do
  id=${id%/}; [ -f "$id/run.json" ] || continue
  alive=false; pid=$(cat "$id/pid" 2>/dev/null)
  if [ -n "$pid" ] && [ "$(readlink "/proc/$pid/cwd")" = "$PWD/$id" ]; then alive=true; fi
  code=$(cat "$id/exit" 2>/dev/null); last=$(tail -n 1 "$id/metrics.jsonl" 2>/dev/null)
  case $last in *'}') ;; *) last=null ;; esac
  printf '{"id":"%s","alive":%s,"exit":%s,"last":%s,"config":%s}\n' \
    "$id" "$alive" "${code:-null}" "$last" "$(tr '\n' ' ' <"$id/run.json")"
done
"""


def list_runs(hosts: Sequence[Host]) -> list[Run]:
    """Every run that any node knows, oldest first."""
    answers = fanout.each(hosts, lambda host: host.run(_LIST).stdout)
    folders: dict[str, dict[int, dict[str, Any]]] = {}
    for host, answer in zip(hosts, answers, strict=True):
        for line in answer.splitlines():
            entry = json.loads(line)
            folders.setdefault(entry["id"], {})[host.index] = entry
    return [_run(run_id, by_node) for run_id, by_node in sorted(folders.items())]


def find_run(hosts: Sequence[Host], run_id: str | None) -> Run:
    """The run with this id, or the newest. Raises UsageError where there is none."""
    runs = list_runs(hosts)
    found = next((run for run in reversed(runs) if run_id in (None, run.run_id)), None)
    if not found:
        known = ", ".join(run.run_id for run in runs) or "none"
        raise UsageError(f"no run {run_id or ''} on this cluster".replace("  ", " "), f"known runs: {known}")
    return found


def _run(run_id: str, by_node: dict[int, dict[str, Any]]) -> Run:
    entries = sorted(by_node.items())
    last: dict[str, Any] = next((entry["last"] for _, entry in entries if entry["last"]), {})
    return Run(
        run_id=run_id,
        config=RunConfig.from_json(json.dumps(entries[0][1]["config"])),
        nodes=tuple(NodeState(index, entry["alive"], entry["exit"]) for index, entry in entries),
        last_step=last.get("step"),
        last_loss=last.get("loss"),
    )


def first_failure(hosts: Sequence[Host], run_id: str) -> Failure | None:
    """The rank that failed first, over all nodes; None where no node knows of one.

    A rank that was killed from outside (a signal other than torchrun's own SIGTERM) is the cause even where its peers
    noticed the broken connection a moment earlier.
    """
    found = [failure for failure in fanout.each(hosts, lambda host: _failure(host, run_id)) if failure]
    return min(found, key=lambda f: (f.exit_code >= 0 or f.exit_code == -15, f.at_seconds), default=None)


def _failure(host: Host, run_id: str) -> Failure | None:
    folder = f".micsctl/runs/{run_id}"
    text = host.read(f"{folder}/failure.json")
    if text is None:
        return None
    account = json.loads(text)
    log = f"{folder}/ranks/*/attempt_0/{account['local_rank']}/stderr.log"
    lines = host.run(f"tail -n 20 {log} 2>/dev/null", check=False).stdout.strip()
    return Failure(
        rank=account["rank"],
        local_rank=account["local_rank"],
        node=host.name,
        exit_code=account["exit_code"],
        at_seconds=account["at_seconds"],
        last_lines=lines,
    )
