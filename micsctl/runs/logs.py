"""One rank's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from micsctl.remote.host import Host
from micsctl.runs.model import Run


def rank_log(
    hosts: Sequence[Host], run: Run, rank: int, on_line: Callable[[str], None], *, follow: bool = False
) -> None:
    """Standard output, then standard error of a rank; with `follow` both as they come until its launcher ends."""
    local = rank % run.config.devices_per_node
    host = next(host for host in hosts if host.index == run.config.node_of(rank))
    folder = f".micsctl/runs/{run.run_id}"
    logs = f"{folder}/ranks/*/attempt_0/{local}"
    going_on = f'-f -s 0.2 --pid="$(cat {folder}/pid)"' if follow else ""
    command = f"tail -q -n +1 {going_on} {logs}/stdout.log {logs}/stderr.log 2>/dev/null || cat {folder}/node.log"
    host.stream(command, on_line)
