"""Writers that are killed at random moments: the newest whole checkpoint loads and equals what was saved.

`python test_checkpoint_kill.py LOCATION TRIALS SEED FOLDER` forks two ranks again and again, kills them with SIGKILL,
and lets the next two find what is left, compare it, and go on from there.
"""

import datetime
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, once per rank
import torch.distributed as dist
from mics.checkpoint import MARK, Identity, Progress, Saver, TrainState, find_resume, load
from mics.checkpoint.states import tensors_of
from mics.checkpoint.stores import open_store
from mics.config import CheckpointConfig
from mics.sharding import apply, connect
from mics.topology import RankGrid
from torch import nn

pytestmark = pytest.mark.distributed
IDENTITY = Identity({"blocks": 4}, {})
RANKS = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(37, 41) for _ in range(4))


def fill(state, step):
    """Values that tell the step: one that was half written, or mixed with another one's files, has others."""
    for name, tensor in sorted(tensors_of(state).items()):
        tensor.fill_(step + len(name) / 1000)


def equals(state, step):
    local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors_of(state).items()}
    return all(torch.equal(t, torch.full_like(t, step + len(name) / 1000)) for name, t in local.items())


def new_state():
    model = Model()
    apply(model, connect(RankGrid(RANKS, 1, 1)), blocks=model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return TrainState(model, optimizer)


def live(rank, folder, location, trial, report):
    """Find what is left, say what it was, and save without end."""
    store = dist.FileStore(f"{folder}/store-{trial}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=60))
    state = new_state()
    resume = find_resume(location, None, IDENTITY)
    good = True
    if resume.checkpoint:
        load(resume.checkpoint, state)
        good = equals(state, resume.progress.step)
    Path(f"{report}-{rank}").write_text(json.dumps([resume.progress.step, good, resume.notes]))
    saver = Saver(location, IDENTITY, CheckpointConfig("/unused", 1, keep=2, background=trial % 2 == 0))
    for step in range(resume.progress.step + 1, 10**6):
        fill(state, step)
        for outcome in saver.save(state, Progress(step, step)):
            assert outcome.problem is None, outcome


def start(folder, location, trial, report):
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            signal.alarm(100)
            try:
                torch.set_num_threads(1)
                live(rank, folder, location, trial, report)
            except BaseException as error:  # noqa: BLE001  (reported, and the rank ends with 1)
                print(f"trial {trial} rank {rank}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        children.append(pid)
    return children


def marked(location):
    store = open_store(location)
    return [int(name.removeprefix("step-").split(".")[0]) for name in store.folders() if store.exists(f"{name}/{MARK}")]


def unfinished(location):
    store = open_store(location)
    return any(not store.exists(f"{name}/{MARK}") for name in store.folders())


def main():
    location, trials, seed, folder = sys.argv[1:]
    draw, interrupted, newest, seen = random.Random(int(seed)), 0, 0, []
    for trial in range(int(trials) + 1):
        report = f"{folder}/report-{trial}"
        children = start(folder, location, trial, report)
        deadline = time.monotonic() + 60
        while not all(Path(f"{report}-{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < deadline, "the ranks do not come up"
            assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a rank ended by itself"
            time.sleep(0.005)
        while not marked(location):  # there is something to lose
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.15))
        ended = os.waitpid(-1, os.WNOHANG)
        assert ended == (0, 0), "a rank ended by itself"
        newest_now = max(marked(location))
        while trial % 2 and not unfinished(location):  # or chance alone decides how many kills fall into a save
            time.sleep(0.001)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        reports = [json.loads(Path(f"{report}-{rank}").read_text()) for rank in range(RANKS)]
        assert reports[0] == reports[1], reports
        step, good, notes = reports[0]
        assert good, reports
        assert step >= newest, "a whole checkpoint was lost"
        interrupted += any("never finished" in note for note in notes)
        assert all("never finished" in note for note in notes), notes
        newest = newest_now
        seen.append(step)
    print(json.dumps({"interrupted": interrupted, "steps": seen}))


@pytest.mark.parametrize(
    ("kind", "trials"),
    [
        ("disk", 4),
        pytest.param("disk", 40, marks=pytest.mark.slow),
        pytest.param("s3", 12, marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_never_hurts_the_last_good_one(tmp_path, request, kind, trials):
    bucket = request.getfixturevalue("bucket") if kind == "s3" else ""
    location = f"s3://{bucket}/run" if bucket else str(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, __file__, location, str(trials), "3", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors
    told = json.loads(output.splitlines()[-1])
    assert len(told["steps"]) == trials + 1
    assert told["steps"] == sorted(told["steps"])
    assert told["steps"][-1] > told["steps"][0] == 0
    if trials > 10:
        assert told["interrupted"] > trials / 4  # the kills do fall into saves


if __name__ == "__main__":
    main()
