"""Who holds the run up, from constructed beats; the flight record's pipe; the limits."""

import os
import threading
from dataclasses import replace

import pytest
from mics.config import LimitsConfig
from mics.ranks import Place
from mics.watch import LEFT, Beat, Watch, flight_record, verdict
from torch.distributed import TCPStore

NAMES = [f"i-{rank // 4}" for rank in range(16)]


def beats(*changed, alive=1.0):
    """Sixteen ranks in hop 1 of step 13; `changed` are others."""
    normal = {rank: Beat(rank, alive, 13, "compute", 40, 7, "hop1_across") for rank in range(16)}
    return normal | {beat.rank: beat for beat in changed}


def judged(*changed, silent=()):
    before = beats(*changed)
    after = {r: beat if r in silent else replace(beat, alive_seconds=3.0) for r, beat in before.items()}
    return verdict(before, after, NAMES, seconds=600.2).removeprefix("stalled for 600 s ")


def at(rank, **place):
    return replace(beats()[rank], **place)


@pytest.mark.parametrize(
    ("changed", "silent", "line"),
    [
        ((), (13,), "in step 13: rank 13 (i-3) is silent; the others wait in hop 1 across"),
        ((at(13, phase="data", moves=39, passes=0, stage=""),), (), "in step 13: rank 13 (i-3) has not left data"),
        ((at(13, phase="checkpoint", step=12, moves=38, stage=""),), (), "in step 12: rank 13 (i-3) has not left chec"),
        ((at(13, stage=""),), (), "in step 13: rank 13 (i-3) has not left compute; the others wait in hop 1 across"),
        ((at(13, passes=6),), (), "in step 13: rank 13 (i-3) has not left compute; the others wait in hop 1 across"),
        # rank 13 computes, its partner waits for it in hop 1, and the rest is further on
        ((at(12, passes=6), at(13, passes=6, stage="")), (), "in step 13: rank 13 (i-3) has not left compute; the oth"),
        ((at(13, phase=LEFT),), (), "in step 13: rank 13 (i-3) has ended; the others wait in hop 1 across"),
        ((at(13, moves=39, stage=""),), (2,), "in step 13: rank 2 (i-0) is silent; the others wait in hop 1 across"),
        ((), (4, 5, 6, 7, 8), "in step 13: ranks 4 (i-1), 5 (i-1), 6 (i-1), 7 (i-1) and 1 more are silent; the others"),
        ((), (), "in step 13: all ranks are in hop 1 across and none is behind"),
        (tuple(Beat(r, 1.0, 0, "start", 0, 0, "") for r in range(16)), (3,), "at the start: rank 3 (i-0) is silent; "),
        ((), tuple(range(16)), "in step 13: ranks 0 (i-0), 1 (i-0), 2 (i-0), 3 (i-0) and 12 more are silent"),
    ],
)
def test_the_line_names_who_the_others_wait_for(changed, silent, line):
    assert judged(*changed, silent=silent).startswith(line)


def test_nccl_is_asked_through_its_pipe_and_waited_for(tmp_path):
    """The pipe and the file as torch's ProcessGroupNCCL has them: <prefix><rank>.pipe and <prefix><rank>."""
    prefix = tmp_path / "rank"
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(prefix), "TORCH_FR_DUMP_TEMP_FILE": str(prefix)}
    pipe = tmp_path / "rank3.pipe"
    os.mkfifo(pipe)
    flight_record(environment, 3)()  # nobody reads: returns at once
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    wait = flight_record(environment, 3)
    assert os.read(reader, 128) == b"1"
    os.close(reader)
    writing = threading.Timer(0.3, lambda: (tmp_path / "rank3").write_bytes(b"record"))
    writing.start()
    wait()
    assert (tmp_path / "rank3").read_bytes() == b"record"
    flight_record({}, 3)()  # no variables, no GPU


def test_the_long_limit_ends_with_the_first_step(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = Watch(store, Place(0, 0, 1, 1), ["i-0"], LimitsConfig(first_step_seconds=100, step_seconds=10), tmp_path)
    limits = []
    for step, phase in ((0, "start"), (41, "data"), (41, "compute"), (42, "data"), (43, "compute")):
        watch.at(step, phase)
        limits.append(watch.limit_seconds)
    watch.at(43, "checkpoint", long=True)
    limits.append(watch.limit_seconds)
    assert limits == [100, 100, 100, 10, 10, 100]
