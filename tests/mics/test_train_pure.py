"""The trainer's pure parts: model, paths, places."""

from dataclasses import replace

import pytest
from mics.config import LimitsConfig
from mics.errors import RunRefusedError
from mics.paths import on_this_node
from mics.ranks import Place, check_place, collective_timeout, node_names, place_of
from mics.train import due


def test_a_checkpoint_is_due_every_so_often_and_at_the_end():
    assert [step for step in range(1, 8) if due(step, every=3, last=step == 7)] == [3, 6, 7]
    assert not due(7, every=0, last=True)


@pytest.mark.parametrize(
    ("path", "shared", "expected"),
    [
        ("/fsx/demo", "/tmp/shared", "/tmp/shared/demo"),
        ("/fsx", "/tmp/shared", "/tmp/shared"),
        ("/fsx2/demo", "/tmp/shared", "/fsx2/demo"),
        ("/data/fsx", "/tmp/shared", "/data/fsx"),
        ("/fsx/demo", "", "/fsx/demo"),
        ("/fsx/demo", None, "/fsx/demo"),
    ],
)
def test_fsx_is_what_the_environment_says(path, shared, expected):
    assert on_this_node(path, {} if shared is None else {"MICS_SHARED": shared}) == expected


def test_a_place_comes_from_torchrun_and_must_fit_the_run():
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    place = place_of(environment)
    assert place == Place(5, 1, 8, 2)
    assert place.node == 2
    check_place(place, nodes=4, devices_per_node=2)
    with pytest.raises(RunRefusedError, match="2 nodes x 4 devices = 8 processes, torchrun started 8 with 2 on this"):
        check_place(place, nodes=2, devices_per_node=4)
    with pytest.raises(RunRefusedError, match="'WORLD_SIZE' is not set"):
        place_of({"RANK": "0", "LOCAL_RANK": "0"})


def test_ranks_have_the_names_of_their_nodes(tiny_run):
    run = tiny_run(nodes=3, devices=2)
    assert node_names(run) == ("node 0", "node 0", "node 1", "node 1", "node 2", "node 2")
    ordered = replace(run, node_order=(2, 0, 1), node_names=("i-0", "i-1", "i-2"))
    assert node_names(ordered) == ("i-2", "i-2", "i-0", "i-0", "i-1", "i-1")


def test_collectives_outlast_the_watchdog():
    limits = LimitsConfig(first_step_seconds=100, step_seconds=700)
    assert collective_timeout(limits).total_seconds() > 700
    assert (
        collective_timeout(LimitsConfig(step_seconds=1e300)).total_seconds() == 365 * 86400
    )  # gloo has no room for it
