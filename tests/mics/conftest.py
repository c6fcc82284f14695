import inspect
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from mics.config import CheckpointConfig, RunConfig, TrainConfig
from mics.shapes import ModelShape

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


TRAINERS = Path(__file__).with_name("trainer_launcher.py")


@pytest.fixture
def tiny_run(tmp_path):
    """tiny_run(**settings): a run.json value that trains a few thousand parameters on the standard library's text.

    Widths that neither 4 nor 8 divides, so shards are uneven. Checkpoints go below tmp_path, if `every` says so.
    """

    def make(*, nodes=2, devices=2, resume_from=None, every=0, interface=None, checkpoints=tmp_path, **train):
        settings = {
            "model": ModelShape(hidden=12, layers=2, heads=3, positions=16),
            "partition": 2,
            "hierarchical": False,
            "micro_batch": 1,
            "accumulation": 2,
            "sequence": 16,
            "steps": 3,
            "precision": "fp32",
            "checkpointing": "none",
            "reshard_after_forward": True,
            "checkpoint": CheckpointConfig(str(checkpoints), every),
        }
        train = TrainConfig(**{**settings, **train})
        checkpoint = str(resume_from) if resume_from else None
        return RunConfig("tiny", train, nodes, devices, interface=interface, resume_from=checkpoint)

    return make


@pytest.fixture
def start_trainers(tmp_path):
    """start_trainers(run, node_environments=(), program="mics.train"): the trainer's processes of all nodes, in one
    session, as a Popen.

    Its stdout ends with the JSON list of exit codes by rank. The run folder is tmp_path / "run".
    """
    started = []

    def start(run, node_environments=(), deadline_s=60, program="mics.train"):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(run.to_json())
        environments = json.dumps(list(node_environments) or [{}] * run.nodes)
        numbers = [str(number) for number in (run.nodes, run.devices_per_node, deadline_s)]
        process = subprocess.Popen(
            [sys.executable, str(TRAINERS), program, str(folder / "run.json"), *numbers, environments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def s3_server():
    """A client of an S3 on loopback. While a module's tests run, the environment names it, also for what they start."""
    from mics.storage import s3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        yield s3()
    server.stop()


@pytest.fixture
def bucket(s3_server):
    """The name of an empty bucket."""
    name = f"b-{uuid.uuid4().hex}"
    s3_server.create_bucket(Bucket=name)
    return name
