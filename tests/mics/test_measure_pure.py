"""The pure parts of the measurements: the fit, the cells, the rounds of pairs, the slices of a stream."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mics.alphabeta import Line, fit
from mics.measure import fit_of, link_of, readable, record_of
from mics.probes import COLLECTIVES, MIB, Cell, MeasureConfig, cells, pairings, slice_rates
from mics.stream import Rates
from mics.topology import RankGrid

latencies = st.floats(1e-6, 1e-1)
slopes = st.floats(1e-12, 1e-7)  # 1 TB/s to 10 MB/s
sizes = st.lists(st.integers(1 << 10, 1 << 30), min_size=2, max_size=8, unique=True)


@given(latencies, slopes, sizes)
def test_a_line_is_found_again(latency, slope, at):
    points = [(float(x), latency + x * slope) for x in at]
    line = fit(points)
    assert line.outlier is None
    assert all(math.isclose(line.seconds(x), seconds, rel_tol=1e-6) for x, seconds in points)


@given(
    st.floats(1e-4, 1e-2), st.floats(1e-10, 1e-8), st.integers(0, 5), st.sampled_from([0.2, 0.5, 2.0, 5.0]), st.data()
)
def test_one_outlier_does_not_count(latency, slope, place, factor, data):
    points = [(float(x), latency + x * slope) for x in (4**i * 4096 for i in range(6))]
    x, seconds = points[place]
    points[place] = (x, seconds * factor)
    points = data.draw(st.permutations(points))
    line = fit(points)
    assert line.outlier == (x, seconds * factor)
    assert math.isclose(line.latency_seconds, latency, rel_tol=1e-6)
    assert math.isclose(line.seconds_per_byte, slope, rel_tol=1e-6)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-7, 1e3)), min_size=2, max_size=8))
def test_nothing_is_ever_negative(points):
    assume(len({size for size, _ in points}) > 1)
    line = fit(points)
    assert line.latency_seconds >= 0
    assert line.seconds_per_byte >= 0
    assert math.isfinite(line.latency_seconds + line.seconds_per_byte)


@given(st.lists(st.floats(0.97, 1.03), min_size=5, max_size=5))
def test_a_little_noise_leaves_no_point_out(noise):
    points = [(x * 1e6, (1e-3 + x * 1e-2) * n) for x, n in zip((1, 4, 8, 16, 64), noise, strict=True)]
    line = fit(points)
    assert line.outlier is None
    assert math.isclose(line.seconds_per_byte, 1e-8, rel_tol=0.1)


def test_small_messages_count_as_much_as_large_ones():
    """Errors are relative: the usual form would take the latency from the noise of the largest message."""
    points = [(1e3, 1.01e-3), (1e4, 1.1e-3), (1e9, 10.5)]
    assert math.isclose(fit(points).latency_seconds, 1e-3, rel_tol=0.05)


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(2.0, 1.0), (2.0, 3.0)], [(1.0, 1.0), (2.0, 0.0)]])
def test_too_little_for_a_line_is_refused(points):
    with pytest.raises(ValueError, match="two different sizes"):
        fit(points)


@given(st.integers(1, 24))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_pairs_at_a_time(nodes):
    rounds = pairings(nodes)
    for pairs in rounds:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy))
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(nodes), 2))
    assert len(rounds) <= nodes


def test_the_first_slice_of_a_stream_is_left_out():
    slow = [(t / 100, t * 10) for t in range(101)]  # 1000 bytes per second for a second
    fast = [(1 + t / 100, 1000 + t * 50) for t in range(1, 901)]  # 5000 for nine
    rates = slice_rates([*slow, *fast], slices=10)
    assert len(rates) == 9
    assert rates == pytest.approx([5000] * 9)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=50), st.floats(1e3, 1e10))
def test_a_steady_stream_has_one_rate(gaps, rate):
    """Whatever the reads are like."""
    moments = list(itertools.accumulate(gaps))
    rates = slice_rates([(t, t * rate) for t in moments], slices=4)
    assert rates == pytest.approx([rate] * len(rates), rel=1e-3)
    assert len(rates) <= 3


def test_all_cells_of_four_nodes_of_two():
    found = cells(MeasureConfig(), world_size=8, devices_per_node=2)
    assert len(set(found)) == len(found)
    named = {(c.collective, c.grid.partition_size, c.grid.hierarchical) for c in found}
    passes = {
        (name, p, form)
        for name in COLLECTIVES[:2]
        for p, form in [(2, False), (4, False), (4, True), (8, False), (8, True)]
    }
    assert named == passes | {("all_reduce", p, False) for p in (1, 2, 4)}


def test_one_device_per_node_has_no_two_stages():
    found = cells(MeasureConfig(forms=("hierarchical",)), world_size=4, devices_per_node=1)
    assert {cell.collective for cell in found} == {"all_reduce"}


def test_a_partition_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="partition size 3 does not divide"):
        cells(MeasureConfig(partition_sizes=(3,)), world_size=8, devices_per_node=2)


def test_measure_json_is_read_as_it_was_written():
    wanted = MeasureConfig(("gather",), (4,), ("flat",), (65536, MIB), repeats=3, seconds=1.5, pairs=True)
    assert MeasureConfig.from_json(wanted.to_json()) == wanted


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("[]", "measure.json"),
        ('{"repeat": 3}', "unexpected keyword argument 'repeat'"),
        ('{"collectives": ["scatter"]}', "collectives has 'scatter'; known: gather"),
        ('{"message_bytes": [0]}', "at least 1"),
        ('{"message_bytes": [1.5]}', "whole numbers"),
        ('{"partition_sizes": ["2"]}', "whole numbers"),
        ('{"tcp_seconds": -1}', "0 or more"),
        ('{"seconds": "long"}', "measure.json"),
        ("{", "Expecting"),
    ],
)
def test_a_bad_measure_json_is_refused(text, because):
    with pytest.raises(ValueError, match=because):
        MeasureConfig.from_json(text)


def test_a_record_says_bytes_by_formula_and_rates_by_the_median():
    cell = Cell("gather", RankGrid(8, 2, 4, hierarchical=True))
    record = record_of(cell, 4 * MIB, [0.1, 0.05, 0.2])
    assert record["seconds"] == {"median": 0.1, "min": 0.05, "max": 0.2}
    assert record["traffic_bytes_per_node"] == 2 * MIB
    assert record["bytes_per_second"] == pytest.approx(20 * MIB)
    assert record["bus_bytes_per_second"] == pytest.approx(30 * MIB)
    assert json.loads(json.dumps(record)) == record
    assert readable(record) == "hierarchical gather p=4 of 4194304 bytes: 100.00 ms, 21.0 MB/s per node"


def test_inside_a_node_the_rate_is_that_of_a_device():
    record = record_of(Cell("reduce_scatter", RankGrid(4, 2, 2)), 1000, [0.001])
    assert (record["traffic_bytes_per_node"], record["bytes_per_second"]) == (0.0, None)
    assert record["bus_bytes_per_second"] == pytest.approx(500e3)
    assert "0.5 MB/s per device" in readable(record)


def test_hop_2_of_a_message_moves_its_shards():
    cell = Cell("all_reduce", RankGrid(8, 2, 4))  # two replicas, 4 nodes
    record = record_of(cell, 8000, [1.0])
    assert record["traffic_bytes_per_node"] == 2 * 1 / 2 * 2 / 4 * 8000
    assert record["bus_bytes_per_second"] == 2 * 1 / 2 * 2000


def test_a_fit_gives_the_rates_that_the_sizes_approach():
    cell = Cell("gather", RankGrid(8, 2, 8))
    fitted = fit_of(cell, [(size, 0.002 + size * 7 / 8 / 50e6) for size in (1e6, 4e6, 16e6)])
    assert fitted["latency_seconds"] == pytest.approx(0.002)
    assert fitted["bytes_per_second"] == pytest.approx(50e6)
    assert readable(fitted) == "gather p=8: 2.00 ms + 50.0 MB/s per node"
    flat = fit_of(cell, [(1e6, 0.002), (2e6, 0.002)])
    assert (flat["bytes_per_second"], flat["bus_bytes_per_second"]) == (None, None)
    assert "no rate" in readable(flat)


def test_a_link_is_the_middle_of_both_directions():
    record = link_of((0, 1), Rates(40e6, 30e6, 50e6), Rates(60e6, 55e6, 65e6))
    assert record["bytes_per_second"] == 50e6
    assert record["back"] == {"median": 60e6, "min": 55e6, "max": 65e6}
    assert readable(record) == "TCP between nodes 0 and 1: 50.0 MB/s"


def test_a_line_predicts():
    assert Line(0.5, 0.25).seconds(2) == 1.0
