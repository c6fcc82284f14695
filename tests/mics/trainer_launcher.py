"""Run one of the trainer's programs on one machine, such as mics.train:
`python trainer_launcher.py PROGRAM CONFIG NODES DEVICES DEADLINE_S NODE_ENVIRONMENTS`.

Like torchrun on every node, but with one import of torch: the ranks are forked. NODE_ENVIRONMENTS is a JSON list with
one object of extra variables per node. SIGTERM and SIGINT are passed on to the ranks. The last line of stdout is a JSON
list of exit codes by rank.
"""

import importlib
import json
import os
import signal
import socket
import sys

import torch._dynamo  # noqa: F401  (the first optimizer would import it, once per rank: seconds each)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_rank(program, config, deadline_s, environment):
    signal.alarm(deadline_s)
    os.environ.update(environment)
    try:
        code = program(["--config", config])
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    name, config, nodes, devices, deadline_s, node_environments = sys.argv[1:]
    program = importlib.import_module(name).main
    nodes, devices = int(nodes), int(devices)
    port = free_port()
    children = []
    for rank in range(nodes * devices):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % devices),
            "WORLD_SIZE": str(nodes * devices),
            "LOCAL_WORLD_SIZE": str(devices),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **json.loads(node_environments)[rank // devices],
        }
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(program, config, int(deadline_s), environment)
            finally:  # not reached without an exception
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        children.append(pid)
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, _: [os.kill(pid, number) for pid in children])
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]))


if __name__ == "__main__":
    main()
