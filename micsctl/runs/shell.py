"""Shell text that several commands share. It works in a run's folder on a node."""

from __future__ import annotations

# `alive`: whether the launcher lives. Its pid alone says little: pids are used again, after a reboot above all.
# `pwd -P`, because /proc names the folder without symbolic links.
ALIVE = r"""
alive() { local pid; pid=$(cat pid 2>/dev/null) && [ "$(readlink "/proc/$pid/cwd")" = "$(pwd -P)" ]; }
"""

# `wait_for_log 0`: until local rank 0 has a log, or will never have one.
# `going_on`: options that let tail go on until the launcher has ended; none where it has.
LOGS = (
    ALIVE
    + r"""
log_of() { echo ranks/*/attempt_0/"$1"/stdout.log; }
wait_for_log() { until [ -f exit ] || [ -f "$(log_of "$1")" ] || ! alive; do sleep 0.1; done; }
going_on() { if alive; then echo "-F -s 0.2 --pid=$(cat pid)"; fi; }
"""
)
