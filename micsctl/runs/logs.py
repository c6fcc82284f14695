"""One rank's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from micsctl.errors import UsageError
from micsctl.remote.host import Host
from micsctl.runs.model import Run
from micsctl.runs.shell import LOGS


def rank_log(
    hosts: Sequence[Host], run: Run, rank: int, on_line: Callable[[str], None], *, follow: bool = False
) -> None:
    """Standard output, then standard error of a rank; with `follow` both as they come until its launcher ends.

    A rank that never started has no log: the launcher's is shown in its place. Raises UsageError for a rank that the
    run does not have, or whose node is gone.
    """
    config = run.config
    if rank >= config.world_size:
        raise UsageError(f"run {run.run_id} has no rank {rank}", f"it has {config.world_size} ranks")
    index = config.node_of(rank)
    host = next((host for host in hosts if host.index == index), None)
    if host is None:
        raise UsageError(f"the log of rank {rank} is lost", f"node {index}, which had it, is gone")
    local = rank % config.devices_per_node
    wait, going_on = (f"wait_for_log {local}", "$(going_on)") if follow else ("", "")
    host.stream(
        f"""cd .micsctl/runs/{run.run_id} || exit 1
{LOGS}
{wait}
log=$(log_of {local})
if [ -f "$log" ]; then tail -q -n +1 {going_on} "$log" "${{log%stdout.log}}stderr.log"; else cat node.log; fi
""",
        on_line,
    )
