"""From metrics.jsonl to what the demo says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micsctl.report import demo
from micsctl.report.curve import Curve, curve, largest_loss_difference, parse_metrics
from micsctl.report.table import format_bytes, format_count, format_memory, format_seconds


def line(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "loss": 5.0 - step * 0.2,
        "step_seconds": 1.0,
        "traffic_bytes": 100e6,
        "traffic_formula_bytes": 100e6,
        "traffic_source": "interface",
    }
    return base | changes


def run(steps: int = 20, **changes: Any) -> Curve:
    return curve("mics", [[line(step, **changes) for step in range(1, steps + 1)]])


STAGE = demo.Stage("netns", True, 400, 4, 2, 2)


def test_a_resumed_attempt_replaces_the_steps_it_repeats() -> None:
    first = [line(step) for step in range(1, 13)]
    second = [line(step, loss=1.0) for step in range(11, 21)]
    whole = curve("mics", [first, second])
    assert whole.steps == tuple(range(1, 21))
    assert whole.losses[9:11] == (3.0, 1.0)
    assert whole.resumed_step == 11


def test_medians_leave_the_first_step_out() -> None:
    slow_start = curve("mics", [[line(1, step_seconds=60.0), line(2, step_seconds=1.0), line(3, step_seconds=3.0)]])
    assert slow_start.median_step_seconds == 2.0


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_an_error() -> None:
    text = json.dumps(line(1)) + "\n" + json.dumps(line(2))[:-3]
    assert [entry["step"] for entry in parse_metrics(text)] == [1]
    with pytest.raises(ValueError, match=r".+"):
        parse_metrics("{\n" + json.dumps(line(1)))


def test_a_step_without_a_finite_loss_agrees_with_nothing() -> None:
    broken = curve("mics", [[line(1), line(2, loss=None), line(3)]])
    assert largest_loss_difference(broken, run()) == largest_loss_difference(broken, broken) == float("inf")


def test_no_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step"):
        curve("mics", [[]])


def ok(zero3: Curve, mics: Curve, leftovers: int = 0) -> bool:
    return demo.result(STAGE, zero3, mics, seconds=1, leftovers=leftovers).ok


def test_the_demo_is_judged_by_what_it_claims() -> None:
    good, mics = run(), replace(run(), resumed_step=11)
    assert ok(good, mics)
    assert not ok(good, mics, leftovers=1)
    assert not ok(good, replace(mics, resumed_step=None))
    assert not ok(good, replace(mics, losses=tuple(x + 2e-4 for x in mics.losses)))
    assert not ok(good, replace(mics, traffic_bytes=tuple(x * 1.03 for x in mics.traffic_bytes)))
    assert not ok(replace(good, losses=(5.0,) * 20), replace(mics, losses=(5.0,) * 20))
    counted = replace(mics, traffic_source="counted", traffic_bytes=tuple(x * 1.03 for x in mics.traffic_bytes))
    assert ok(good, counted)


def test_the_speed_up_is_reported_and_never_required() -> None:
    slower = replace(run(), resumed_step=11, step_seconds=(9.0,) * 20)
    found = demo.result(STAGE, run(), slower, seconds=1, leftovers=0)
    assert found.ok
    assert found.speedup == pytest.approx(1 / 9)


def test_the_largest_difference_is_over_shared_steps() -> None:
    assert largest_loss_difference(run(3), run(5)) == 0
    with pytest.raises(ValueError, match="share no step"):
        largest_loss_difference(run(3), replace(run(3), steps=(7, 8, 9)))


def test_the_page_is_self_contained_and_escapes() -> None:
    html = demo.html(STAGE, run(), replace(run(), resumed_step=11))
    assert html.count("<svg") == 2
    assert "<script" not in html
    assert not re.search(r'(src|href)="(https?:)?//', html)
    assert "emulated 400 Mbit/s links" in html


def test_unshaped_seconds_say_nothing() -> None:
    assert "seconds say nothing" in demo.caption(replace(STAGE, shaped=False, link_mbps=None))


def test_quantities() -> None:
    assert [format_bytes(x) for x in (0, 999, 1500, 101.2e6, 3e9, 2e12)] == [
        "0 B", "999 B", "1.5 kB", "101.2 MB", "3.0 GB", "2.0 TB",
    ]  # fmt: skip
    assert format_memory(54 << 20) == "54.0 MiB"
    assert format_count(3_257_000) == "3.3 M"
    assert [format_seconds(x) for x in (0.24, 5.3, 250, 43140)] == ["240 ms", "5.3 s", "4 min 10 s", "11 h 59 min"]


@given(st.floats(min_value=0, max_value=1e7))
def test_seconds_are_always_short(seconds: float) -> None:
    assert re.fullmatch(r"\d+ ms|\d+\.\d s|\d+ min \d\d s|\d+ h \d\d min", format_seconds(seconds))
