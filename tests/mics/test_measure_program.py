"""`python -m mics.measure` as a program on two nodes of two: its lines, its exit codes."""

import json
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from mics.probes import MIB, MeasureConfig
from mics.turns import in_turns

DEADLINE_S = 90


@pytest.fixture
def start_measuring(tmp_path, tiny_run, start_trainers):
    """start_measuring(wanted): the program on two nodes of two."""

    def start(wanted):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "measure.json").write_text(wanted.to_json())
        return start_trainers(tiny_run(), deadline_s=DEADLINE_S, program="mics.measure")

    return start


def ended(process):
    """(exit codes by rank, the screen of rank 0, stderr of all ranks)"""
    output, errors = process.communicate(timeout=DEADLINE_S + 10)
    *screen, codes = output.splitlines()
    return json.loads(codes), screen, errors.splitlines()


@pytest.mark.distributed
def test_two_nodes_of_two_are_measured(tmp_path, start_measuring):
    sizes = (64 << 10, MIB)
    wanted = MeasureConfig(partition_sizes=(2, 4), message_bytes=sizes, repeats=2, seconds=30, tcp_seconds=0.3)
    codes, screen, errors = ended(start_measuring(wanted))
    assert codes == [0] * 4, errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(screen) == len(lines)
    link, *rest = lines
    assert (link["kind"], link["nodes"]) == ("link", [0, 1])
    assert link["bytes_per_second"] > 1e6
    assert link["forth"]["min"] <= link["forth"]["median"] <= link["forth"]["max"]
    timed = [line for line in rest if line["kind"] == "collective"]
    forms = {(t["collective"], t["partition_size"], t["hierarchical"]) for t in timed}
    passes = {(name, *form) for name in ("gather", "reduce_scatter") for form in [(2, False), (4, False), (4, True)]}
    assert forms == passes | {("all_reduce", 2, False)}
    assert [t["message_bytes"] for t in timed] == [size for size in sizes for _ in forms]
    assert all(t["repeats"] == 2 and 0 < t["seconds"]["min"] <= t["seconds"]["max"] for t in timed)
    across = {(t["collective"], t["partition_size"], t["hierarchical"]): t for t in timed if t["message_bytes"] == MIB}
    assert across["gather", 4, True]["traffic_bytes_per_node"] == MIB / 2
    assert across["gather", 4, False]["traffic_bytes_per_node"] == MIB * 3 / 4
    assert across["gather", 2, False]["bytes_per_second"] is None
    fits = [line for line in rest if line["kind"] == "fit"]
    assert len(fits) == len(forms)
    assert rest[-len(fits) :] == fits
    assert all(f["latency_seconds"] >= 0 and f["seconds_per_byte"] >= 0 for f in fits)


@pytest.mark.distributed
def test_what_the_nodes_cannot_have_is_refused_in_one_line(start_measuring, tmp_path):
    codes, _, errors = ended(start_measuring(MeasureConfig(partition_sizes=(3,))))
    assert codes == [2] * 4
    refused = "mics: measure.json: partition size 3 does not divide the world size 4; it may be 1, 2, 4"
    assert errors == [refused] * 2  # local rank 0 of each node
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stop_ends_it_with_143(tmp_path, start_measuring):
    wanted = MeasureConfig(("gather",), (2,), message_bytes=(1024,), repeats=10**9, seconds=600.0, tcp_seconds=0.1)
    process, log = start_measuring(wanted), tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not (log.exists() and log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    codes, _, errors = ended(process)
    assert codes == [143] * 4, errors
    assert "mics: SIGTERM: stopped measuring" in errors


def take_turns():
    """In each repeat the ranks meet at every pass, so all see the same order; rank 1 is slow in the second pass."""
    order = []

    def passes(number):
        def one():
            order.append(number)
            if number == 1 and dist.get_rank() == 1:
                time.sleep(0.05)

        return one

    asked = iter([False, dist.get_rank() == 0])
    rows = in_turns(
        [passes(0), passes(1), passes(2)], repeats=9, enough=lambda: next(asked), device=torch.device("cpu")
    )
    return order, rows


@pytest.mark.distributed
def test_turns_go_forth_and_back_and_the_slowest_rank_counts(run_ranks):
    (order, rows), other = run_ranks(take_turns, ranks=2)
    assert order == [0, 1, 2, 2, 1, 0]  # ended by rank 0 alone
    assert other == (order, rows)
    assert all(row[1] > 0.04 > max(row[0], row[2]) for row in rows)


def reach_nothing():
    from mics.errors import RunRefusedError
    from mics.ranks import Place
    from mics.stream import one_way

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    create = socket.create_connection

    def refused(address, **settings):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return create(probe.getsockname(), **settings)

    socket.create_connection = refused
    from mics import stream

    stream.ANSWER_SECONDS = 1.0
    place = Place(dist.get_rank(), 0, 2, 1)
    try:
        one_way([(0, 1)], place, seconds=0.1)
    except RunRefusedError as error:
        return str(error)
    return None


@pytest.mark.distributed
def test_nodes_that_do_not_reach_each_other_are_refused_on_all_ranks(run_ranks):
    said = run_ranks(reach_nothing, ranks=2)
    assert said[0] == said[1]
    assert said[0].startswith("node 0: the TCP stream to node 1 at 127.0.0.1:")
