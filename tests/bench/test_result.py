"""What measurements say."""

from __future__ import annotations

import json
import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.entries import Entry

from micsctl.bench import cells, result
from micsctl.bench.model import Site
from micsctl.cli.render import plain

from .conftest import SHAPED, line, lines

seconds = st.floats(0.01, 100)
ENTRIES = cells.strategies(("mics", "mics-flat", "zero3"), world_size=8, devices_per_node=2, on_cpu=True)


def steps_of(times: dict[str, list[float]]) -> tuple[result.Step, ...]:
    return result.steps_of(lines(times))


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=9), st.floats(0.1, 10))
def test_a_speedup_is_the_median_of_the_ratios_within_the_rounds(
    times: list[tuple[float, float]], slower: float
) -> None:
    fast, slow = [a for a, _ in times], [b for _, b in times]
    steps = steps_of({"a": fast, "b": slow})
    found = result.speedup(steps, fast="a", slow="b")
    assert found == pytest.approx(median(b / a for a, b in times[1:]))  # the first round warms up
    # a machine that is slower in some rounds changes nothing
    weather = [slower if number % 2 else 1.0 for number in range(len(times))]
    steps = steps_of(
        {
            "a": [a * w for a, w in zip(fast, weather, strict=True)],
            "b": [b * w for b, w in zip(slow, weather, strict=True)],
        }
    )
    assert result.speedup(steps, fast="a", slow="b") == pytest.approx(found)


def test_a_speedup_needs_both() -> None:
    steps = steps_of({"a": [1.0, 2.0]})
    assert result.speedup(steps, fast="a", slow="b") is None
    assert result.speedup(steps_of({"a": [1.0], "b": [1.0]}), fast="a", slow="b") is None  # warm-up alone


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=5))
def test_the_loss_difference_is_relative_and_within_rounds(losses: list[float]) -> None:
    same = [line(name, number, 1.0, loss=loss) for number, loss in enumerate(losses, 1) for name in "ab"]
    assert result.largest_loss_difference(result.steps_of(same)) == 0
    same[1] |= {"loss": losses[0] * 1.01}
    assert result.largest_loss_difference(result.steps_of(same)) == pytest.approx(0.01 / 1.01)
    same[1] |= {"loss": None}
    assert result.largest_loss_difference(result.steps_of(same)) == math.inf


def rows_of(times: dict[str, list[float]], unshaped: dict[str, list[float]], site: Site = SHAPED):  # type: ignore[no-untyped-def]
    return result.rows(
        ENTRIES,
        steps_of(times),
        steps_of(unshaped),
        site,
        formula=lambda entry: 100e6 * entry.partition_size,
        held=lambda entry: 1 / entry.partition_size,
    )


TIMES = {entry.name: [9.0, 2.0 + number, 4.0 + number, 3.0 + number] for number, entry in enumerate(ENTRIES)}


def test_a_row_of_the_table() -> None:
    mics = rows_of(TIMES, {"mics, p = 2": [1.0, 2.5, 1.5, 2.0]})[0]
    assert (mics.step_seconds.median, mics.step_seconds.min, mics.step_seconds.max) == (3.0, 2.0, 4.0)
    assert mics.unshaped_step_seconds == 2.0
    assert mics.step_over_bound == pytest.approx(3.0 / 4.0)  # 200 MB need 4 s on 400 Mbit/s, longer than unshaped
    assert mics.traffic_source == "interface"
    assert mics.traffic_difference == pytest.approx(1000 / 200e6 - 1)
    ring = next(row for row in rows_of(TIMES, {}) if row.name == "zero3, p = 8")
    assert ring.speedup_vs_zero3 == 1.0
    assert ring.unshaped_step_seconds is None
    assert ring.step_over_bound is None


def test_rows_as_json_have_the_documented_keys() -> None:
    row = json.loads(json.dumps(plain(rows_of(TIMES, {})[0])))
    assert list(row)[:10] == [
        "strategy", "partition_size", "hierarchical", "reduce_scatter", "step_seconds", "unshaped_step_seconds",
        "traffic_bytes", "traffic_formula_bytes", "speedup_vs_zero3", "loss",
    ]  # fmt: skip
    assert row["step_seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}


def claims_of(entries: tuple[Entry, ...], times: dict[str, list[float]], held: dict[str, float]):  # type: ignore[no-untyped-def]
    steps = steps_of(times)
    rows = result.rows(entries, steps, (), SHAPED, formula=lambda _: 1.0, held=lambda e: held.get(e.name, 0.0))
    return result.claims(entries, steps, rows, SHAPED)


def test_the_headline_is_against_the_fastest_rival_that_holds_no_more() -> None:
    entries = cells.strategies(cells.KNOWN, world_size=8, devices_per_node=2, on_cpu=True)
    times = {entry.name: [1.0, 10.0] for entry in entries}
    times |= {"mics, p = 2": [1.0, 2.0], "deepspeed-zero3, p = 8": [1.0, 6.0], "zero3, p = 8": [1.0, 8.0]}
    times |= {"zero2, p = 8": [1.0, 1.0], "zero3, p = 8, native": [1.0, 1.0], "fsdp2, p = 8": [1.0, 1.0]}  # no rivals
    headline, *others = claims_of(entries, times, {})
    assert (headline.fast, headline.slow, headline.ratio) == ("mics, p = 2", "deepspeed-zero3, p = 8", 3.0)
    assert headline.note == (
        "headline: the fastest of zero3, fsdp2-hsdp, deepspeed-zero3, deepspeed-zero3, second gather, deepspeed-hpz"
        " at equal memory"
    )
    assert ("mics, p = 2", "zero3, p = 8", 4.0) in {(claim.fast, claim.slow, claim.ratio) for claim in others}
    # one that holds more on a device is no rival
    headline, *_ = claims_of(entries, times, {"mics, p = 2": 8.0, "deepspeed-zero3, p = 8": 9.0})
    assert headline.slow == "zero3, p = 8"


def test_without_zero3_there_is_no_headline() -> None:
    entries = cells.strategies(("mics", "deepspeed-zero3"), world_size=8, devices_per_node=2, on_cpu=True)
    found = claims_of(entries, {entry.name: [1.0, 2.0] for entry in entries}, {})
    assert not any("headline" in claim.note for claim in found)
    assert any(claim.slow == "deepspeed-zero3, p = 8" for claim in found)


def test_sixteen_bits_may_differ_more() -> None:
    assert result.losses_agree_to("fp32") == result.losses_agree_to("fp64") == 1e-4
    assert result.losses_agree_to("bf16") == 1e-2


def test_the_other_claims() -> None:
    entries = cells.strategies(("mics", "mics-flat", "zero3"), world_size=8, devices_per_node=2, on_cpu=True)
    times = {entry.name: [1.0, 10.0] for entry in entries}
    times |= {"mics, p = 4, hierarchical": [1.0, 5.0], "mics, hop 2 every micro-step, p = 2": [1.0, 3.0]}
    times |= {"mics, p = 2": [1.0, 2.0], "mics-flat, p = 4": [1.0, 8.0]}
    found = {(claim.fast, claim.slow): claim.ratio for claim in claims_of(entries, times, {})}
    assert found["mics, p = 4, hierarchical", "mics-flat, p = 4"] == pytest.approx(1.6)
    assert found["mics, p = 4, hierarchical", "zero3, p = 8"] == pytest.approx(2.0)
    assert found["mics, p = 2", "mics, hop 2 every micro-step, p = 2"] == pytest.approx(1.5)


def test_without_rows_there_is_no_claim() -> None:
    entries = cells.strategies(("ddp",), world_size=8, devices_per_node=2, on_cpu=True)
    assert claims_of(entries, {"ddp, p = 1": [1.0, 2.0]}, {}) == ()


@given(st.floats(0, 1e12), st.sampled_from([None, 1500, 9001]))
def test_the_formula_itself_is_always_allowed(formula: float, mtu: int | None) -> None:
    low, high = result.allowed(formula, mtu)
    assert low <= formula <= high
    assert low == pytest.approx(0.99 * formula)
    assert high >= 1.01 * formula


def test_overhead_is_what_frames_cost() -> None:
    assert result.overhead(1500) == pytest.approx(1514 / 1448 - 1 + 66 / 1448 / 2)
    assert result.overhead(9001) < 0.012


@pytest.mark.parametrize(("sent", "ok"), [(1000.0, False), (100e6, True), (98e6, False), (104e6, False)])
def test_a_cell_of_bench_traffic(sent: float, ok: bool) -> None:
    entry = cells.traffic(("zero3",), world_size=8, devices_per_node=2, on_cpu=True)[0]
    step = result.steps_of([line(entry.name, 1, 1.0) | {"traffic_bytes": sent}])
    [cell] = result.traffic_cells([entry], step, SHAPED, formula=lambda _: 100e6)
    assert (cell.ok, cell.traffic_source) == (ok, "interface")


def test_cells_without_an_interface_are_counted_or_not_measured() -> None:
    entry = cells.traffic(("zero3",), world_size=8, devices_per_node=2, on_cpu=True)[0]
    counted = line(entry.name, 1, 1.0) | {"traffic_bytes": None, "counted_bytes": 100.5e6}
    [cell] = result.traffic_cells([entry], result.steps_of([counted]), SHAPED, formula=lambda _: 100e6)
    assert (cell.ok, cell.traffic_source, cell.allowed_bytes[1]) == (True, "counted", pytest.approx(101e6))
    nothing = line(entry.name, 1, 1.0) | {"traffic_bytes": None}
    [cell] = result.traffic_cells([entry], result.steps_of([nothing]), SHAPED, formula=lambda _: 100e6)
    assert (cell.ok, cell.traffic_source, cell.traffic_bytes) == (True, "", None)
