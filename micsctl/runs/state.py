"""What the run folders on the nodes say. One remote command a node, whatever the number of runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any

from mics.config import RunConfig

from micsctl.errors import MicsctlError, UsageError
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.model import ENDED_EXIT_CODE, EXIT_WORDS, SAVED_EXIT_CODE, STALLED_EXIT_CODE, Failure, NodeState, Run
from micsctl.runs.shell import ALIVE

# With these the trainer itself ends a run, and one of its ranks says why on a line that begins with "mics: ".
_SAYS_WHY = {*EXIT_WORDS, SAVED_EXIT_CODE, ENDED_EXIT_CODE}

# One line of JSON a run.
_LIST = (
    ALIVE
    + r"""
for folder in .micsctl/runs/*/; do (
  cd "$folder" && [ -f run.json ] || exit 0
  if alive; then alive=true; else alive=false; fi
  code=$(cat exit 2>/dev/null); last=$(tail -n 1 metrics.jsonl 2>/dev/null)
  case $last in *'}') ;; *) last=null ;; esac
  printf '{"id":"%s","alive":%s,"exit":%s,"last":%s,"config":%s}\n' \
    "$(basename "$folder")" "$alive" "${code:-null}" "$last" "$(tr '\n' ' ' <run.json)"
) 2>/dev/null; done
"""
)


def list_runs(hosts: Sequence[Host]) -> list[Run]:
    """Every run that any node knows, oldest first. Raises MicsctlError for a run.json that cannot be read."""
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
    try:
        config = RunConfig.from_json(json.dumps(entries[0][1]["config"]))
    except ValueError as error:
        raise MicsctlError(
            f"cannot read run.json of run {run_id}",
            f"{error}\nanother version of micsctl made it",
            next=f"micsctl exec rm -r .micsctl/runs/{run_id}   (forgets the run; its checkpoints stay)",
        ) from None
    return Run(
        run_id=run_id,
        config=config,
        nodes=tuple(NodeState(index, entry["alive"], entry["exit"]) for index, entry in entries),
        last_step=last.get("step"),
        last_loss=last.get("loss"),
        skipped_in_row=last.get("skipped_in_row", 0),
    )


def first_failure(hosts: Sequence[Host], run_id: str) -> Failure | None:
    """The rank that failed first, over all nodes; None where no node knows of one.

    After a stall the ranks that ended themselves over it know whom they waited for; he is killed in the end. Otherwise
    a rank that a signal ended is the cause even where its peers noticed the broken connection a moment earlier. But
    SIGTERM is what torchrun sends to the others, and with SIGABRT a rank ends itself, over a broken connection too.
    Where the trainer ended the run, a node whose ranks say why comes before one whose ranks are silent.
    """
    found = [failure for failure in fanout.each(hosts, lambda host: _failure(host, run_id)) if failure]
    return min(found, key=_order, default=None)


def _order(failure: Failure) -> tuple[bool, bool, bool, float]:
    code = failure.exit_code
    cause = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
    silent = code in _SAYS_WHY and not failure.last_lines
    return code != STALLED_EXIT_CODE, not cause, silent, failure.at_seconds


def _failure(host: Host, run_id: str) -> Failure | None:
    folder = f".micsctl/runs/{run_id}"
    text = host.read(f"{folder}/failure.json")
    if text is None:
        return None
    account = json.loads(text)
    logs = f"{folder}/ranks/*/attempt_0"
    if account["exit_code"] in _SAYS_WHY:  # any rank of the node may be the one that says why
        question = f"grep -h '^mics: ' {logs}/*/stderr.log 2>/dev/null | sort -u | tail -n 5"
    else:
        question = f"tail -n 20 {logs}/{account['local_rank']}/stderr.log 2>/dev/null"
    lines = host.run(question, check=False).stdout.strip()
    return Failure(
        rank=account["rank"],
        local_rank=account["local_rank"],
        node=host.name,
        exit_code=account["exit_code"],
        at_seconds=account["at_seconds"],
        last_lines=account.get("stall") or lines,
    )
