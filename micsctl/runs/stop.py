"""End a run by its id, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.shell import ALIVE

# torchrun's ranks lead sessions of their own, so no process group holds them all: they are found by the run id in
# their environment (with the node: nodes of a process-level sandbox see each other's processes). The ranks are asked
# first, not torchrun: they save a checkpoint, and torchrun then reports their exit code. The launcher is waited for
# as well, since it writes that code down.
_STOP = r"""
all() { grep -lz "^MICS_RUN_NODE=$run/$node\$" /proc/[0-9]*/environ 2>/dev/null; }
ranks() { grep -lz '^LOCAL_RANK=' $(all) /dev/null 2>/dev/null; }
pids() { cut -d/ -f3; }
ended_within() {
  local end=$((SECONDS + $1))
  while [ -n "$(all)" ] || alive; do [ "$SECONDS" -lt "$end" ] || return 1; sleep 0.1; done
}
asked=$(ranks); kill -TERM $(echo "${asked:-$(all)}" | pids) 2>/dev/null
ended_within "$grace" && exit 0
kill -KILL $(all | pids) 2>/dev/null
ended_within 5 && exit 0
echo "still there: $(all | pids | tr '\n' ' ')" >&2; exit 1
"""


def stop(hosts: Sequence[Host], run_id: str, *, grace_seconds: float = 30) -> None:
    """SIGTERM, then SIGKILL after the grace (in whole seconds), on all nodes.

    Returns when no process of the run is left and its exit codes are written.
    """
    grace = math.ceil(grace_seconds)

    def end(host: Host) -> None:
        names = f"cd .micsctl/runs/{run_id} 2>/dev/null; run={run_id} node={host.index} grace={grace}"
        host.run(names + ALIVE + _STOP, timeout_seconds=grace + 30)

    fanout.each(hosts, end)
