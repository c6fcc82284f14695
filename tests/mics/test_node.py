"""Which rank of a node failed first, as torchrun saw it."""

from __future__ import annotations

import pytest
from mics.node import first_failure
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def failure(exit_code: int, seconds: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file="/nowhere")
    made.timestamp = seconds
    return made


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([(1, 100), (1, 99)], 1),  # the earlier one
        ([(1, 100), (-9, 100)], 1),  # killed, and its peer noticed within the same second
        ([(-6, 100), (1, 99)], 1),  # an abort over the connection that broke
        ([(-15, 99), (1, 100)], 1),  # torchrun's own SIGTERM is a consequence, whatever the clock says
        ([(-15, 100), (-15, 99)], 1),
        ([(-9, 99), (74, 100)], 1),  # torchrun killed the rank that stood still; the other knows why
    ],
)
def test_the_cause_comes_before_its_consequences(failures: list[tuple[int, int]], rank: int) -> None:
    assert first_failure({r: failure(*f) for r, f in enumerate(failures)})[0] == rank
