"""Train real models on the devices of one machine and measure: the functions behind the GPU tests.

They take the devices as a value, so that a test without a GPU can run the same code on two CPU processes.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from mics.config import CheckpointConfig, RunConfig, TrainConfig

from micsctl.planner.machines import has_bf16
from micsctl.planner.model import Machines, Plan
from micsctl.planner.plan import plan

LIMIT_SECONDS = 900
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """A finished run: what was planned and the lines of its metrics.jsonl."""

    plan: Plan
    records: tuple[dict, ...]

    @property
    def losses(self):
        return [record["loss"] for record in self.records]

    @property
    def predicted_bytes(self):
        """Allocated bytes that the planner expects: without its reserve for what torch does not allocate."""
        chosen = next(c for c in self.plan.candidates if c.partition_size == self.plan.partition_size)
        return chosen.memory.total - chosen.memory.overhead

    @property
    def memory_bytes(self):
        return max(record["memory_bytes"] for record in self.records)

    def median(self, key):
        return statistics.median(record[key] for record in self.records[WARM_UP_STEPS:])


def machines_here():
    """One machine with the GPUs of this one, or two CPU processes."""
    import torch

    if not torch.cuda.is_available():
        return Machines(1, 2, 4 << 30, "cpu", bf16=False)
    name = torch.cuda.get_device_name(0)
    memory = torch.cuda.get_device_properties(0).total_memory
    return Machines(1, torch.cuda.device_count(), memory, name, has_bf16(name))


def train(folder: Path, machines: Machines, settings: TrainConfig) -> Outcome:
    """Plan for `machines` and run the trainer there. The nodes of `machines` are all this machine."""
    made = plan(settings, machines)
    folder.mkdir(parents=True)
    run = RunConfig("gpu", made.train, machines.nodes, machines.devices_per_node)
    (folder / "run.json").write_text(run.to_json())
    port = 29400 + os.getpid() % 500
    nodes = [
        subprocess.Popen(
            _torchrun(node, machines, port, folder / "run.json"),
            env={**os.environ, **_devices_of(node, machines), "OMP_NUM_THREADS": "1"},
            stdout=(folder / f"node-{node}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for node in range(machines.nodes)
    ]
    try:
        codes = [node.wait(LIMIT_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # and torchrun its ranks, which would keep their GPUs
        for node in nodes:
            node.wait(60)
    if any(codes):
        raise AssertionError("\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("node-*.log"))))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Outcome(made, tuple(json.loads(line) for line in lines))


def train_in_two_halves(folder: Path, machines: Machines, settings: TrainConfig) -> tuple[Outcome, Outcome]:
    """Stop after half of the steps, with a checkpoint, and go on from it."""
    settings = replace(settings, checkpoint=CheckpointConfig(path=str(folder / "checkpoints"), every=2))
    first = train(folder / "first", machines, replace(settings, steps=settings.steps // 2))
    return first, train(folder / "second", machines, settings)


def _torchrun(node, machines, port, run):
    shape = [f"--nnodes={machines.nodes}", f"--node-rank={node}", f"--nproc-per-node={machines.devices_per_node}"]
    place = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *shape, *place, "-m", "mics.train", "--config", str(run)]


def _devices_of(node, machines):
    """Stand-in nodes on one machine: each sees its own GPUs only."""
    if machines.device == "cpu":
        return {"GLOO_SOCKET_IFNAME": "lo"}
    first = node * machines.devices_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + machines.devices_per_node)))}


def as_two_nodes(machines: Machines) -> Machines:
    """The same devices, taken for two nodes: then collectives have two stages."""
    return replace(machines, nodes=2, devices_per_node=machines.devices_per_node // 2)


def report(rows, machines: Machines) -> str:
    """Markdown: a table of (what, expected, measured)."""
    head = f"# {machines.world_size} x {machines.device}\n\n| what | expected | measured |\n|---|---|---|\n"
    return head + "".join(f"| {what} | {expected} | {measured} |\n" for what, expected, measured in rows)
