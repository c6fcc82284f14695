"""What `micsctl sandbox` and `micsctl stop` say."""

from __future__ import annotations

import pytest
from mics.config import RunConfig, TrainConfig

from micsctl.cli.sandbox import _after_stop, _times
from micsctl.report.runs import after_stop
from micsctl.runs.model import NodeState, Run
from micsctl.sandbox.state import Leftovers


@pytest.mark.parametrize(
    ("left", "words"), [(None, "every time"), (2, "2 more times"), (1, "1 more time"), (0, "used up")]
)
def test_a_fault_that_is_used_up_is_not_one_for_ever(left: int | None, words: str) -> None:
    assert _times(left) == words


def test_what_ended_with_the_emulator_is_not_left_behind() -> None:
    assert _after_stop(Leftovers(resources=("vpc-1", "i-1"))) == [
        "2 emulated resources ended with it", "no sandbox runs; nothing is left on this machine",
    ]  # fmt: skip
    assert _after_stop(Leftovers(mounts=("/x",))) == ["left behind: mounts: /x"]


@pytest.mark.parametrize(
    ("exit_codes", "words"),
    [
        ((75, 75), "has stopped at step 3 of 20 and saved a checkpoint\nnext: micsctl launch --resume r"),
        ((0, 0), "is done"),
        ((1, 1), "has ended at step 3 of 20 without saving a checkpoint (failed, exit code 1)"),
    ],
)
def test_a_run_that_was_stopped_says_whether_it_saved(exit_codes: tuple[int, int], words: str) -> None:
    train = TrainConfig(
        partition=2,
        hierarchical=False,
        micro_batch=1,
        precision="fp32",
        checkpointing="none",
        reshard_after_forward=True,
    )
    config = RunConfig("r", train, 2, 2)
    nodes = tuple(NodeState(i, alive=False, exit_code=code) for i, code in enumerate(exit_codes))
    assert after_stop(Run("r", config, nodes, last_step=3, last_loss=3.0)) == f"run r {words}"
