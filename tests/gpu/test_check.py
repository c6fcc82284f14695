"""The GPU suite's own code, on two CPU processes: it must not be broken on the day a GPU is there."""

import pytest
from mics.config import CheckpointConfig, TrainConfig

SETTINGS = {"sequence": 64, "accumulation": 1, "steps": 4, "checkpoint": CheckpointConfig(every=0)}


@pytest.mark.distributed
def test_a_run_is_planned_trained_and_reported(check, tmp_path):
    machines = check.as_two_nodes(check.Machines(1, 2, 4 << 30, "cpu", bf16=False))
    settings = TrainConfig(model="gpt-3m", micro_batch=1, partition=2, **SETTINGS)
    outcome = check.train(tmp_path / "run", machines, settings)
    assert len(outcome.losses) == 4
    assert outcome.losses[-1] < outcome.losses[0]
    assert outcome.predicted_bytes > 16 * outcome.plan.parameters / 2
    assert outcome.memory_bytes > 0
    assert outcome.median("step_seconds") > 0
    assert "| it | 1 | 2 |" in check.report([("it", 1, 2)], machines)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_goes_on_from_its_checkpoint(check, tmp_path):
    machines = check.Machines(1, 2, 4 << 30, "cpu", bf16=False)
    settings = TrainConfig(model="gpt-3m", micro_batch=1, partition=2, **SETTINGS)
    first, second = check.train_in_two_halves(tmp_path, machines, settings)
    steps = [[record["step"] for record in outcome.records] for outcome in (first, second)]
    assert steps == [[1, 2], [3, 4]]


def test_a_run_that_fails_shows_its_output(check, tmp_path):
    machines = check.Machines(1, 1, 4 << 30, "cpu", bf16=False)
    settings = TrainConfig(model="gpt-3m", micro_batch=1, partition=1, data=("/nowhere",), **SETTINGS)
    with pytest.raises(AssertionError, match="/nowhere is not there"):
        check.train(tmp_path / "run", machines, settings)
