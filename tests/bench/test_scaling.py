"""Scaling, the sweep, and what the planner's models are asked."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.entries import Entry
from mics.shapes import shape_of

from micsctl.bench import cells, predicted, scaling
from micsctl.bench.crossover import stops_at
from micsctl.bench.formula import held_bytes, hop2_bytes, sent_bytes, together, unfit
from micsctl.bench.model import PAYS_FROM, Point, ScalingRow, Spread
from micsctl.bench.result import steps_of

from .conftest import SHAPED, lines

sizes = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4, unique=True).map(sorted)


@given(sizes)
def test_strong_scaling_shares_out_one_batch(found: list[int]) -> None:
    counts = {nodes: scaling.strong_micro_steps(nodes, found) for nodes in found}
    assert len({nodes * count for nodes, count in counts.items()}) == 1
    assert all(count >= 1 for count in counts.values())


@given(st.floats(0.5, 5), st.floats(0.1, 10))
def test_efficiency_is_one_where_nothing_is_lost(step: float, weather: float) -> None:
    jobs = {}
    for nodes in (1, 2, 4):
        strong = step * scaling.strong_micro_steps(nodes, (1, 2, 4))
        # the second round is slower for all: it changes no efficiency
        jobs[nodes] = [
            steps_of(lines({"weak": [0.1, step * w, step * w], "strong": [0.1, strong * w, strong * w]}))
            for w in (1.0, weather)
        ]
    hop2 = {1: 0.0, 2: 10e6, 4: 15e6}
    rows = scaling.rows(
        (1, 2, 4), jobs, SHAPED, hop2_bytes=hop2, planned={2: 9.0, 4: 6.0}, compute_seconds=1.0, micro_steps=4
    )
    for row in rows:
        assert row.weak_efficiency == pytest.approx(1.0)
        assert row.strong_efficiency == pytest.approx(1.0)
    assert rows[0].compute_per_hop2 is None  # no hop 2 on one node
    assert rows[1].compute_per_hop2 == pytest.approx(4.0 / 0.2)  # 10 MB on 400 Mbit/s
    assert [row.planned_compute_per_hop2 for row in rows] == [None, 9.0, 6.0]


def test_a_step_twice_as_long_is_half_as_efficient() -> None:
    jobs = {n: [steps_of(lines({"weak": [0, 1.0 * n], "strong": [0, 2.0]}))] for n in (1, 2)}
    rows = scaling.rows(
        (1, 2), jobs, SHAPED, hop2_bytes={1: 0.0, 2: 1e6}, planned={}, compute_seconds=None, micro_steps=4
    )
    assert (rows[1].weak_efficiency, rows[1].strong_efficiency) == (0.5, 0.5)


def test_emulated_compute_is_nowhere_above_the_planned_ratio() -> None:
    hop2, planned = {1: 0.0, 2: 10e6, 4: 15e6, 8: 17.5e6}, {2: 23.0, 4: 14.0, 8: 10.0}
    seconds = scaling.emulated_compute_seconds(hop2, planned, SHAPED, micro_steps=4)
    assert seconds is not None
    ratios = {n: 4 * seconds / (sent * 8 / 400e6) for n, sent in hop2.items() if n > 1}
    assert all(ratios[n] <= planned[n] * (1 + 1e-9) for n in ratios)
    assert ratios[8] == pytest.approx(10.0)  # the tightest
    assert scaling.emulated_compute_seconds(hop2, planned, replace(SHAPED, link_mbps=None), micro_steps=4) is None
    assert scaling.emulated_compute_seconds({1: 0.0}, {}, SHAPED, micro_steps=4) is None


def test_notes_say_what_is_emulated_and_what_says_nothing() -> None:
    quick, slow = (ScalingRow(1, Spread(s, s, s), 1, 4, Spread(s, s, s), 1, 4, 0, None, None) for s in (4.1, 6.0))
    assert "Every byte of communication is real" in scaling.notes(SHAPED, 1.0, [quick])[0]
    assert "A step takes 6.0 s where the wait alone takes 4.0 s" in scaling.notes(SHAPED, 1.0, [slow])[0]
    assert "say nothing" in scaling.notes(SHAPED, None, [quick])[0]
    assert scaling.notes(replace(SHAPED, level="aws"), None, [quick]) == ()


def test_the_time_model_is_asked_for_fixed_work_on_each_device() -> None:
    found = predicted.compute_per_hop2_of((1, 2, 4, 8))
    assert set(found) == {2, 4, 8}
    assert found[2] > found[4] > found[8] > 1  # the same compute, and a hop 2 that grows with 2 (r-1)/r


def test_predictions_lie_where_the_plot_expects_them() -> None:
    points = predicted.crossover()
    assert {point.what.split(",")[0] for point in points} == {"p3dn", "p4d", "p5"}
    assert all(0 < point.compute_per_traffic < math.inf and point.speedup >= 0.99 for point in points)


falling = st.lists(st.floats(0.01, 100), min_size=2, max_size=8, unique=True).map(sorted)


@given(falling, st.randoms())
def test_where_it_stops_paying_lies_between_the_points(xs: list[float], random) -> None:  # type: ignore[no-untyped-def]
    points = [Point(x, 3.0 if number < len(xs) // 2 else 1.0, "") for number, x in enumerate(xs)]
    random.shuffle(points)
    found = stops_at(points)
    assert found is not None
    assert xs[len(xs) // 2 - 1] <= found * (1 + 1e-9)
    assert found <= xs[len(xs) // 2] * (1 + 1e-9)


def test_it_may_pay_everywhere_or_nowhere() -> None:
    assert stops_at([Point(1.0, 2.0, ""), Point(9.0, PAYS_FROM, "")]) is None
    assert stops_at([Point(1.0, 1.0, "")]) == 0.0
    assert stops_at([]) is None
    assert stops_at([Point(1.0, 1.2, ""), Point(4.0, 1.0, "")]) == pytest.approx(2.0)


def test_bytes_by_formula_are_those_of_the_known_run() -> None:
    """16.8 M parameters on 4 x 2 ranks, s = 4: a prototype on FSDP2 sent 708 and 101 MB, headers included."""
    from micsctl.bench.cells import DEFAULT_MODEL

    mics, zero3 = Entry("m", "mics", 2), Entry("z", "zero3", 8)
    assert sent_bytes(zero3, DEFAULT_MODEL, "fp32", SHAPED) == pytest.approx(703.3e6, rel=1e-3)
    assert sent_bytes(mics, DEFAULT_MODEL, "fp32", SHAPED) == pytest.approx(100.7e6, rel=1e-3)
    assert hop2_bytes(mics, DEFAULT_MODEL, "fp32", SHAPED) == sent_bytes(mics, DEFAULT_MODEL, "fp32", SHAPED)


def test_the_last_matrix_is_not_gathered_twice_by_deepspeed() -> None:
    """Measured on 8 x 1 ranks with four micro-steps: 236.0 MB, TCP/IP's 0.2 % included."""
    from micsctl.bench.cells import TRAFFIC_MODEL

    forced = Entry("d", "deepspeed-zero3", 8, reduce_scatter="native", second_gather=True)
    site = replace(SHAPED, nodes=8, ranks_per_node=1)
    assert sent_bytes(forced, TRAFFIC_MODEL, "fp32", site) == pytest.approx(236.0e6 / 1.002, rel=0.002)


def test_bytes_that_stay_on_a_device() -> None:
    from micsctl.bench.cells import DEFAULT_MODEL

    parameters = DEFAULT_MODEL.parameters

    def held(entry: Entry) -> float:
        return held_bytes(entry, DEFAULT_MODEL, "fp32", SHAPED) / parameters

    assert held(Entry("", "mics", 2)) == 8
    assert held(Entry("", "zero3", 8)) == held(Entry("", "fsdp2", 8)) == 2
    assert held(Entry("", "zero2", 8)) == 6
    assert held(Entry("", "deepspeed-zero3", 8)) == 6
    assert held(Entry("", "deepspeed-zero3", 8, second_gather=True)) == 2
    assert held(Entry("", "deepspeed-hpz", 8)) == 8  # the gathered weights, and half of a second copy


def test_what_does_not_fit_or_has_no_formula_is_not_compared() -> None:
    big, a100 = shape_of("bert-10b"), replace(SHAPED, ranks_per_node=8, device="A100")

    def why(entry: Entry, device_bytes: float | None = 36e9) -> str:
        return unfit(entry, big, "bf16", a100, device_bytes=device_bytes)

    assert why(Entry("", "mics", 8)) == ""
    assert "it needs 161" in why(Entry("", "ddp", 1))
    assert why(Entry("", "ddp", 1), None) == ""
    assert "it needs 40" in why(Entry("", "deepspeed-zero3", 32, second_gather=True))  # in fp32, whole, for a moment
    assert "no formula" in why(Entry("", "deepspeed-zero3", 32))


def test_nothing_starts_that_the_machines_memory_cannot_hold() -> None:
    entry = Entry("", "ddp", 1)
    why = unfit(entry, shape_of("gpt2-1.5b"), "fp32", SHAPED, device_bytes=None)
    assert re.fullmatch(r"all ranks need about 2\d\d GB, and 24 GB are free", why)
    assert unfit(entry, cells.DEFAULT_MODEL, "fp32", SHAPED, device_bytes=None) == ""


def test_entries_take_turns_where_all_fit_into_memory() -> None:
    from micsctl.bench.cells import DEFAULT_MODEL, KNOWN, strategies

    rows = strategies(KNOWN, world_size=8, devices_per_node=2, on_cpu=True)

    def fit(free: float, level: str = "netns") -> bool:
        site = replace(SHAPED, free_memory_bytes=free, level=level)
        return together(rows, DEFAULT_MODEL, "fp32", site, device_bytes=54 << 20)

    assert fit(23e9)  # measured: 14 contenders take 17 GB of this machine
    assert not fit(12e9)
    assert fit(12e9, "aws")  # machines of their own
    gpu = replace(SHAPED, device="A100")
    assert together(rows, DEFAULT_MODEL, "bf16", gpu, device_bytes=40e9)
    assert not together(rows, DEFAULT_MODEL, "bf16", gpu, device_bytes=1e9)
