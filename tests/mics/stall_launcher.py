"""Runs that stall: `python stall_launcher.py SCENARIOS LIMIT_S DEADLINE_S FOLDER`.

One process imports torch and forks the ranks of all scenarios (a comma-separated list) at once, 2 nodes x 2 devices
each. A rank joins the others and runs `loop` below under a watch. Node i of a scenario has the run folder
FOLDER/<scenario>/<i>; the scenario's stderr is FOLDER/<scenario>/stderr. The last line of stdout is a JSON object: exit
codes by rank, by scenario. A culprit that has not ended when the others have is killed; every rank ends at the
deadline.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mics.config import LimitsConfig
from mics.ranks import join, leave, meet, place_of
from mics.watch import Watch

NODES, DEVICES = 2, 2
CULPRIT = {"host-stopped": 0}  # by scenario; otherwise 2
BAD_STEP = 3


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stand_still(scenario, watch):
    """What the culprit does in its data phase of the bad step."""
    if scenario in ("stopped", "host-stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario == "left":
        watch.__exit__(None, None, None)
    if scenario != "well":
        time.sleep(1000)


def loop(scenario, place, watch):
    stage = None
    watch.follow(lambda: (0, stage))
    for step in range(1, 6):
        watch.at(step, "data")
        if step == BAD_STEP and place.rank == CULPRIT.get(scenario, 2):
            stand_still(scenario, watch)
        watch.at(step, "step")
        stage = "hop1_across"
        dist.all_reduce(torch.ones(4))
        stage = None
        time.sleep(0.05)


def run_rank(scenario, limit_s, deadline_s, folder):
    signal.alarm(deadline_s)
    place, timeout = place_of(os.environ), timedelta(seconds=deadline_s)
    if scenario == "never-came" and place.rank == CULPRIT.get(scenario, 2):
        time.sleep(1000)
    store = meet(place, os.environ, timeout=timeout)
    names = [f"i-{rank // place.local_world_size}" for rank in range(place.world_size)]
    run_folder = folder / str(place.node)
    run_folder.mkdir(exist_ok=True)
    limits = LimitsConfig(first_step_seconds=limit_s * (1 if scenario == "never-came" else 20), step_seconds=limit_s)
    with Watch(store, place, names, limits, run_folder) as watch:
        join(place, store, timeout=timeout)
        loop(scenario, place, watch)
        leave()


def fork_rank(rank, port, scenario, limit_s, deadline_s, folder):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / "stderr").open("a") as file:
            os.dup2(file.fileno(), 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % DEVICES),
            "WORLD_SIZE": str(NODES * DEVICES),
            "LOCAL_WORLD_SIZE": str(DEVICES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        run_rank(scenario, limit_s, deadline_s, folder)
        code = 0
    except BaseException:  # noqa: BLE001  (reported, and the rank ends with 1)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def wait_for(scenario, children):
    culprit = children[CULPRIT.get(scenario, 2)]
    status = {pid: os.waitpid(pid, 0)[1] for pid in children if pid != culprit}
    deadline = time.monotonic() + (60 if scenario in ("well", "sleeping") else 0)
    while (ended := os.waitpid(culprit, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(culprit, signal.SIGKILL)
        ended = os.waitpid(culprit, 0)
    status[culprit] = ended[1]
    return [os.waitstatus_to_exitcode(status[pid]) for pid in children]


def main():
    scenarios, limit_s, deadline_s, folder = sys.argv[1:]
    children = {}
    for scenario in scenarios.split(","):
        port, own = free_port(), Path(folder) / scenario
        own.mkdir()
        arguments = (port, scenario, float(limit_s), int(deadline_s), own)
        children[scenario] = [fork_rank(rank, *arguments) for rank in range(NODES * DEVICES)]
    print(json.dumps({scenario: wait_for(scenario, pids) for scenario, pids in children.items()}))


if __name__ == "__main__":
    main()
