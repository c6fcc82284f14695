import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LAUNCHER = Path(__file__).with_name("rank_launcher.py")


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """run_ranks(function, ranks=8, deadline_s=60, **arguments): what a top-level function of the calling test file
    returned on each rank, all in one gloo group on loopback. Fails with the ranks' output; leaves no process."""

    def run(function, *, ranks=8, deadline_s=60, **arguments):
        folder = tmp_path_factory.mktemp("ranks")
        torch.save(arguments, folder / "arguments.pt")
        command = [sys.executable, LAUNCHER, inspect.getfile(function), function.__name__, ranks, deadline_s, folder]
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=deadline_s + 10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            pytest.fail(f"{function.__name__} on {ranks} ranks ended with {process.returncode}\n{output}")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]

    return run
