"""Three minutes of what `make soak` does for twenty."""

import importlib.util
from pathlib import Path

import pytest


def load():
    spec = importlib.util.spec_from_file_location("soak", Path(__file__).with_name("soak.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_again_and_again_ends_on_the_curve_of_one_that_is_not(tmp_path):
    result = load().soak(tmp_path, seconds=110, kill_every_seconds=20)
    assert result.kills >= 3
    assert result.steps >= 30
    assert result.same_curve, result
