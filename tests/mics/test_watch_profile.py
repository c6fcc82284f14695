"""Profiler windows, the step timer, and the settings of the process."""

import gc
import gzip
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from mics.config import ProfileConfig
from mics.profile import Window
from mics.ranks import Place
from mics.timer import StepTimer
from torch import nn

CPU = torch.device("cpu")


def steps_with(window, numbers):
    for step in numbers:
        window.at(step)
        with torch.profiler.record_function(f"mics step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    window.close()


def recorded_steps(folder):
    with gzip.open(folder / "profile" / "rank-2.json.gz") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names
    return sorted(name for name in names if name.startswith("mics step"))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (range(1, 7), ["mics step 3", "mics step 4"]),
        (range(1, 4), ["mics step 3"]),  # the run ends inside the window
        (range(4, 7), ["mics step 4"]),  # a resumed run starts inside it
    ],
)
def test_the_window_records_its_steps(tmp_path, numbers, expected):
    steps_with(Window(ProfileConfig(first_step=3, steps=2), tmp_path, Place(2, 0, 4, 2), CPU), numbers)
    assert recorded_steps(tmp_path) == expected
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-2.json.gz"]


@pytest.mark.parametrize(
    ("config", "place", "numbers"),
    [
        (ProfileConfig(), Place(0, 0, 4, 2), range(1, 7)),
        (ProfileConfig(first_step=3), Place(1, 1, 4, 2), range(1, 7)),  # one rank a node
        (ProfileConfig(first_step=3, steps=2), Place(0, 0, 4, 2), range(5, 7)),  # resumed after it
    ],
)
def test_otherwise_nothing_is_recorded(tmp_path, config, place, numbers):
    steps_with(Window(config, tmp_path, place, CPU), numbers)
    assert list(tmp_path.iterdir()) == []


def test_the_timer_adds_up_its_parts_and_starts_again():
    timer = StepTimer(CPU)
    for _ in range(2):
        with timer.part("data"):
            time.sleep(0.01)
    taken = timer.take()
    assert taken["data"] >= 0.02
    assert (taken["compute"], taken["forward"], taken["optimizer"]) == (0, 0, 0)
    assert timer.take() == dict.fromkeys(("data", "compute", "forward", "optimizer"), 0.0)


def test_a_followed_block_computes_the_same_and_is_timed():
    class Block(nn.Linear):
        def forward(self, input, *, scale):
            time.sleep(0.01)
            return super().forward(input) * scale

    block, timer = Block(3, 3), StepTimer(CPU)
    input = torch.ones(2, 3)
    plain = block(input, scale=2.0)
    names = list(dict(block.named_parameters()))
    timer.follow([block])
    assert torch.equal(block(input, scale=2.0), plain)
    assert list(dict(block.named_parameters())) == names
    assert timer.take()["forward"] >= 0.01


SETTINGS = """
import gc, os, torch
from mics import settings
settings.deterministic()
print(torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
print(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
settings.quiet_garbage()
print(gc.isenabled(), gc.get_freeze_count() > 1000)
class Ring: pass
def lose():
    ring = Ring(); ring.self = ring
lose(); settings.collect(settings.COLLECT_EVERY - 1)
print(sum(isinstance(o, Ring) for o in gc.get_objects()))
settings.collect(settings.COLLECT_EVERY)
print(sum(isinstance(o, Ring) for o in gc.get_objects()))
"""


def test_settings_of_the_process():
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.stdout.split() == ["True", ":4096:8", "True", "False", "False", "True", "1", "0"], done.stderr
    assert gc.isenabled()
