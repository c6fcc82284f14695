"""Where MiCS pays on real machines, predicted."""

from __future__ import annotations

import pytest
from mics.shapes import PRESETS

from micsctl.errors import UsageError
from micsctl.planner.pays import TYPES, WORK, Point, fastest, points, speedup
from micsctl.planner.time import Batch

BERT_10B = PRESETS["bert-10b"]


@pytest.fixture(scope="module")
def every() -> tuple[Point, ...]:
    return points()


def test_points_for_all_machines_show_both_regions(every: tuple[Point, ...]) -> None:
    for name in TYPES:
        mine = [point for point in every if point.type_name == name]
        assert min(point.speedup for point in mine) < 1.1
        assert max(point.speedup for point in mine) > 2
        assert {point.range_share for point in mine} == {0.40 if name.startswith("p5") else 0.25}


def test_it_stops_paying_where_compute_outlasts_traffic(every: tuple[Point, ...]) -> None:
    slow = [point for point in every if point.compute_per_traffic < 0.5 and point.partition_size <= 8]
    fast = [point for point in every if point.compute_per_traffic > 10]
    assert min(point.speedup for point in slow) > 1.5
    assert fast
    assert max(point.speedup for point in fast) < 1.1


def test_mics_with_its_best_p_is_never_slower(every: tuple[Point, ...]) -> None:
    """p = n and flat is zero3 itself."""
    assert min(point.speedup for point in every) >= 1


def test_compute_per_traffic_is_that_of_the_link_at_its_full_rate() -> None:
    """By hand: 8 nodes, 16 micro-steps; zero3 sends 63/64 (2 + 2 + 2) bytes per parameter and micro-step, the root's
    second gather aside, at 12.5 GB/s; a forward pass takes 10.4 ms a block, 4 of them with the recompute. 2 %."""
    (point,) = points(("p3dn.24xlarge",), {"bert-10b": WORK["bert-10b"]}, (8,), (8,))
    assert point.compute_per_traffic == pytest.approx(127 * 4 * 10.4e-3 / (63 / 64 * 6 * 10.1e9 / 12.5e9), rel=0.02)
    assert point.partition_size == 8
    assert not point.hierarchical


def test_speedup_is_that_of_the_same_point() -> None:
    (point,) = points(("p3dn.24xlarge",), {"bert-10b": WORK["bert-10b"]}, (8,), (8,))
    assert speedup(BERT_10B, "p3dn.24xlarge", 8, "mics", "zero3") == point.speedup
    assert speedup(BERT_10B, "p3dn.24xlarge", 8, "zero3", "mics") == pytest.approx(1 / point.speedup)


def test_what_does_not_fit_has_no_point_and_no_speedup() -> None:
    assert points(("p3dn.24xlarge",), {"llama-70b": WORK["llama-70b"]}, (2,), (8,)) == ()
    with pytest.raises(UsageError, match="zero3 against mics"):
        speedup(PRESETS["llama-70b"], "p3dn.24xlarge", 2, "zero3", "mics")


def test_a_given_partition_size_is_kept() -> None:
    choice = fastest(BERT_10B, "p4d.24xlarge", 8, "mics", partition=32)
    assert choice is not None
    assert choice.grid.partition_size == 32
    flat = fastest(BERT_10B, "p4d.24xlarge", 8, "mics-flat", partition=32)
    assert flat is not None
    assert not flat.grid.hierarchical
    assert choice.time.step_seconds <= flat.time.step_seconds


def test_what_the_machines_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError):
        fastest(BERT_10B, "p4d.24xlarge", 8, "mics", partition=3)
    with pytest.raises(UsageError):
        fastest(BERT_10B, "p4d.24xlarge", 8, "mica")
    with pytest.raises(UsageError):
        fastest(BERT_10B, "m5.large", 8, "mics", batch=Batch(micro_batch=1))
