"""End a run by its id, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from micsctl.remote import fanout
from micsctl.remote.host import Host

# torchrun's ranks lead sessions of their own, so no process group holds them all: they are found by the run id in
# their environment (with the node: nodes of a process-level sandbox see each other's processes). The ranks are asked
# first, not torchrun: they save a checkpoint, and torchrun then reports their exit code.
_STOP = r"""
all() {{ grep -lz '^MICS_RUN_NODE={run_id}/{node}$' /proc/[0-9]*/environ 2>/dev/null; }}
ranks() {{ grep -lz '^LOCAL_RANK=' $(all) /dev/null 2>/dev/null; }}
pids() {{ cut -d/ -f3; }}
[ -n "$(all)" ] || exit 0
asked=$(ranks); kill -TERM $(echo "${{asked:-$(all)}}" | pids) 2>/dev/null
for _ in $(seq {tenths}); do [ -n "$(all)" ] || exit 0; sleep 0.1; done
kill -KILL $(all | pids) 2>/dev/null
for _ in $(seq 50); do [ -n "$(all)" ] || exit 0; sleep 0.1; done
echo "still there: $(all | pids | tr '\n' ' ')" >&2; exit 1
"""


def stop(hosts: Sequence[Host], run_id: str, *, grace_seconds: float = 30) -> None:
    """SIGTERM, then SIGKILL after the grace, on all nodes. Returns when no process of the run is left."""

    def end(host: Host) -> None:
        command = _STOP.format(run_id=run_id, node=host.index, tenths=max(1, int(grace_seconds * 10)))
        host.run(command, timeout_seconds=grace_seconds + 30)

    fanout.each(hosts, end)
