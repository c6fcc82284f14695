"""A team's own model on the sandbox: its code is shipped, its checkpoints lie in S3, a spot notice stops it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from micsctl.home import Home
from micsctl.sandbox import control

MICSCTL = Path(sys.executable).with_name("micsctl")
pytestmark = [pytest.mark.sandbox, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.out = nn.RMSNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        return x + self.out(torch.nn.functional.silu(self.inner(self.norm(x))))

class Mixer(nn.Module):
    vocabulary = 256

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(48, 256)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def make():
    return Mixer()
"""
CONFIG = """
name: team
cluster: {{nodes: 2, instance_profile: mics-nodes}}
sandbox: {{level: {level}, links: none}}
train:
  model: ourmodel.nets:make
  strategy: {strategy}
  partition: {partition}
  micro_batch: 1
  accumulation: 1
  sequence: 32
  steps: {steps}
  precision: fp32
  validation: {{every: 4, sequences: 8}}
  checkpoint: {{path: "s3://weights/team", every: 2, keep: 2}}
"""


class Laptop:
    def __init__(self, folder: Path, level: str) -> None:
        self.folder, self.level = folder, level
        package = folder / "ourmodel"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "nets.py").write_text(MODEL)

    def configure(self, *, steps: int, strategy: str = "mics", partition: int | str = 4) -> None:
        text = CONFIG.format(level=self.level, steps=steps, strategy=strategy, partition=partition)
        (self.folder / "mics.yaml").write_text(text)

    def __call__(self, *arguments: str, code: int = 0) -> Any:
        done = subprocess.run(
            [MICSCTL, *arguments, "--json"],
            cwd=self.folder,
            env={**os.environ, "MICSCTL_HOME": str(self.folder / "home")},
            capture_output=True,
            text=True,
            timeout=400,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["netns", "process"] if os.geteuid() == 0 else ["process"])
def laptop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, client: Callable[..., Any]
) -> Iterator[Laptop]:
    made = Laptop(tmp_path_factory.mktemp("team"), request.param)
    made.configure(steps=4)
    try:
        made("up")
        info = control.status(Home(made.folder / "home"))
        assert info
        client(info, "s3").create_bucket(Bucket="weights")
        yield made
    finally:
        made("down", "--yes")
        left = made("sandbox", "stop")
        shutil.rmtree(made.folder)
    assert left["total"] == 0, left


def test_1_the_plan_says_what_it_cannot_know(laptop: Laptop) -> None:
    plan = laptop("plan")
    assert plan["parameters"] is None
    assert plan["partition_size"] == 4
    laptop.configure(steps=4, partition="auto")
    refused = laptop("plan", code=2)["error"]
    assert "train.partition" in refused["what"] + refused["why"]


def test_2_the_model_is_shipped_and_trained_and_its_checkpoints_lie_in_s3(
    laptop: Laptop, client: Callable[..., Any]
) -> None:
    laptop.configure(steps=20)
    run_id = laptop("launch")["run_id"]
    info = control.status(Home(laptop.folder / "home"))
    listed = client(info, "s3").list_objects_v2(Bucket="weights", Prefix=f"team/{run_id}/")["Contents"]
    marks = sorted(entry["Key"].split("/")[2] for entry in listed if entry["Key"].endswith("complete.json"))
    assert marks == ["step-18", "step-20"]
    log = laptop("logs", run_id)["lines"]
    assert any("validation" in line for line in log)


def test_3_another_strategy_goes_on_from_them(laptop: Laptop) -> None:
    first = laptop("runs")[-1]
    laptop.configure(steps=24, strategy="zero2", partition="auto")
    laptop("launch", "--resume", first["run_id"])
    resumed = laptop("runs")[-1]
    assert (resumed["status"], resumed["step"]) == ("done", 24)
    assert resumed["loss"] < first["loss"]


def test_4_a_spot_notice_saves_and_stops_the_run(laptop: Laptop) -> None:
    laptop.configure(steps=100_000)
    run_id = laptop("launch", "--detach")["run_id"]
    deadline = time.monotonic() + 300
    while not (laptop("runs")[-1]["step"] or 0) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    laptop("sandbox", "fault", "*", "SpotInterruption", "--node", "1", "--seconds", "120")
    while laptop("runs")[-1]["status"] == "running":
        assert time.monotonic() < deadline + 60
        time.sleep(0.5)
    stopped = laptop("runs")[-1]
    assert (stopped["run_id"], stopped["status"]) == (run_id, "stopped")
    laptop("sandbox", "fault", "--clear")
    made = stopped["step"]
    laptop.configure(steps=made + 1)
    laptop("launch", "--resume", run_id)
    assert laptop("runs")[-1]["step"] == made + 1
