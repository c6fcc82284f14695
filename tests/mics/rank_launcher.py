"""Run one function of a test file on n ranks: `python rank_launcher.py FILE FUNCTION RANKS DEADLINE_S FOLDER`.

One process imports torch and forks the ranks, so torch is loaded once instead of n times. Each rank joins a gloo group
over FOLDER/store, calls the function with the arguments in FOLDER/arguments.pt, and writes FOLDER/<rank>.pt. Every
rank ends at the deadline, whatever happens to its parent. The first rank that fails takes the others down.
"""

import datetime
import importlib.util
import os
import signal
import sys
import time
import traceback

import torch
import torch._dynamo  # the first optimizer would import it, once per rank: seconds each
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor


def load(file, function):
    spec = importlib.util.spec_from_file_location("ranks_under_test", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def run_rank(rank, target, ranks, deadline_s, folder):
    signal.alarm(deadline_s)
    torch.set_num_threads(1)
    arguments = torch.load(f"{folder}/arguments.pt", weights_only=False)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    result = target(**arguments)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()  # a fast rank must not close connections that a slow one still reads
    dist.destroy_process_group()


def main():
    file, function, ranks, deadline_s, folder = sys.argv[1:]
    ranks, deadline_s = int(ranks), int(deadline_s)
    target = load(file, function)
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, target, ranks, deadline_s, folder)
                code = 0
            except BaseException:  # noqa: BLE001  (reported, and the rank ends with 1)
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children[pid] = rank
    failed = {}
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if status and not failed:
            time.sleep(0.5)  # let the others write their own reason
            for other in children:
                os.kill(other, signal.SIGKILL)
        if status:
            failed[rank] = status
    if failed:
        sys.exit(f"ranks failed (rank: wait status): {failed}")


if __name__ == "__main__":
    main()
