"""Tables, sentences and pages of benchmarks."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from micsctl.bench.model import (
    Claim,
    Collective,
    Collectives,
    Crossover,
    Point,
    Rate,
    Row,
    Scaling,
    ScalingRow,
    Site,
    Spread,
    Strategies,
    Traffic,
    TrafficCell,
)
from micsctl.report import bench

CAPTION = Site(4, 2, "netns", 400, 9001, "cpu", 24e9).caption
MICS = Row(
    strategy="mics",
    partition_size=2,
    hierarchical=False,
    reduce_scatter="ring",
    step_seconds=Spread(5.5, 5.0, 6.25),
    unshaped_step_seconds=2.0,
    traffic_bytes=101.2e6,
    traffic_formula_bytes=100.8e6,
    speedup_vs_zero3=3.5,
    loss=5.43211,
    name="mics, p = 2",
    traffic_source="interface",
    held_bytes=1.0,
    step_over_bound=1.2,
)
ZERO3 = replace(MICS, strategy="zero3", name="zero3, p = 8", traffic_bytes=None, unshaped_step_seconds=None)
FOUND = Strategies(
    nodes=4,
    ranks_per_node=2,
    micro_steps=4,
    link_mbps=400,
    rows=(MICS, ZERO3),
    emulated=True,
    caption=CAPTION,
    parameters=16_800_000,
    sequence=64,
    micro_batch=1,
    steps=7,
    warmup_steps=3,
    claims=(Claim("mics, p = 2", "zero3, p = 8", 3.5, "headline: the best"),),
    losses_agree_to=1e-4,
    losses_equal=True,
    interleaved=True,
    on_cpu=True,
    largest_loss_difference=1e-7,
    left_out=("deepspeed-hpz: left out, DeepSpeed <is> not installed",),
)


def test_the_place_says_what_times_are() -> None:
    assert CAPTION == "CPU/gloo, emulated link of 400 Mbit/s"
    assert "say nothing about networks" in Site(4, 2, "process", None, None, "cpu", 24e9).caption
    assert Site(2, 8, "aws", None, None, "A100", 24e9).caption == "A100/NCCL, 2 nodes x 8 devices"


def test_table_of_strategies() -> None:
    table = bench.strategies(FOUND)
    assert table.rows[0] == (
        "mics", "2", "", "ring", "5.5 s (5.0 s - 6.2 s)", "2.0 s", "1.20", "101.2 MB", "100.8 MB", "+0.40%", "3.50x",
        "5.43211",
    )  # fmt: skip
    assert table.rows[1][5:10] == ("-", "1.20", "-", "100.8 MB", "-")
    assert CAPTION in table.caption


def test_verdict_in_sentences() -> None:
    lines = bench.verdict(FOUND)
    assert lines[0] == "mics, p = 2 is 3.50x as fast as zero3, p = 8 (headline: the best)"
    assert any(line.startswith("Equal memory") for line in lines)
    assert any(line.startswith("The losses are equal") for line in lines)
    assert any(f"seconds an illustration: {CAPTION}. On real clusters expect less" in line for line in lines)
    assert not any("illustration" in line for line in bench.verdict(replace(FOUND, emulated=False)))
    counted = replace(FOUND, rows=(replace(MICS, traffic_source="counted"), replace(ZERO3, strategy="fsdp2")))
    assert any(line.startswith("Losses are proof. Bytes were counted by mics") for line in bench.verdict(counted))
    assert "counted by mics" in bench.strategies(counted).caption
    assert any("wait in each collective" in line for line in bench.verdict(counted))
    assert not any("wait in each collective" in line for line in bench.verdict(replace(counted, on_cpu=False)))
    apart = replace(FOUND, losses_equal=False, largest_loss_difference=math.inf)
    assert any(line.startswith("THE LOSSES DIFFER") for line in bench.verdict(apart))


def test_no_strategy_is_called_faster_where_seconds_say_nothing_about_networks() -> None:
    said = " ".join(bench.verdict(replace(FOUND, link_mbps=None)))
    assert "as fast as" not in said
    assert "The losses are equal" in said


def test_a_step_quicker_than_its_bound_is_not_passed_over() -> None:
    assert not [line for line in bench.verdict(FOUND) if "measure again" in line]
    busy = replace(FOUND, rows=(replace(MICS, step_over_bound=0.6), ZERO3))
    assert [line for line in bench.verdict(busy) if "the machine was busier" in line]


def test_steps_that_were_not_interleaved_are_not_called_so() -> None:
    alone = replace(FOUND, interleaved=False)
    assert "7 interleaved steps after 3" in bench.strategies(FOUND).caption
    assert "interleaved" not in bench.strategies(alone).caption
    assert "one after the other" in bench.strategies_page(alone)


def cell(sent: float | None) -> TrafficCell:
    return TrafficCell("zero3, p = 8", 8, 2, 4, 4, sent, 100.0, "interface", (99.0, 102.0))


def test_traffic_is_judged() -> None:
    found = Traffic(False, (cell(100.5), cell(103.0), cell(None)), 3_000_000, "1%", ())
    assert [row[-1] for row in bench.traffic(found).rows] == ["ok", "OUTSIDE", "not measured"]
    assert (
        bench.traffic_verdict(found)[0]
        == "1 of 2 measured cells agree with the formula; the largest difference is 3.00%"
    )


SPREAD = Spread(1.0, 1.0, 1.0)
COLLECTIVES = Collectives(
    4,
    2,
    400,
    47e6,
    (
        Collective(
            "gather",
            4,
            True,
            1e-3,
            46e6,
            90e6,
            (Rate(1 << 20, 7, SPREAD, 30e6, 0.64), Rate(4 << 20, 5, SPREAD, 45e6, 0.95)),
        ),
        Collective("gather", 2, False, 1e-4, None, 2e9, (Rate(1 << 20, 7, SPREAD, None, None),)),
    ),
    CAPTION,
)


def test_collectives_as_shares_of_one_stream() -> None:
    rows = bench.collectives(COLLECTIVES).rows
    assert rows[0] == ("gather, p = 4, hierarchical", "1.00 ms", "46.0 MB/s per node", "64%", "95%")
    assert "Medians of 5 to 7 repeats" in bench.collectives(COLLECTIVES).caption
    assert rows[1] == ("gather, p = 2", "0.10 ms", "2.0 GB/s per device, inside", "-", "-")
    assert bench.collectives_verdict(COLLECTIVES) == (
        "hierarchical: from 4 MiB up at least 95% of one TCP stream (gather, p = 4, hierarchical, 4 MiB)",
    )


def scaling_row(nodes: int) -> ScalingRow:
    return ScalingRow(nodes, SPREAD, 0.98, 4, SPREAD, 0.5, 8 // nodes, 1e6, 9.0, 10.0)


SCALING = Scaling(2, 400, (scaling_row(1), scaling_row(8)), CAPTION, 3_000_000, 2, 3, 2, 1.2, ("Emulated: compute",))
CROSSOVER = Crossover(
    4,
    2,
    (Point(0.2, 3.0, "400 Mbit/s"),),
    (Point(4.0, 1.0, "2 s"),),
    (Point(3.0, 1.1, "p5, bert-10b"),),
    None,
    2.5,
    CAPTION,
    1,
)


def test_crossover_is_said_for_links_and_for_compute() -> None:
    over_links, over_compute = bench.crossover_verdict(CROSSOVER)
    assert over_links.startswith("Over link speeds: mics is at least 1.1x as fast as zero3, up to")
    assert over_links.endswith("0.20")
    assert over_compute.startswith("Over emulated compute: mics is less than 1.1x")
    assert "more than 2.50 times" in over_compute
    assert "nowhere" in bench.crossover_verdict(replace(CROSSOVER, stops_over_compute=0.0))[1]
    assert len(bench.crossover_verdict(replace(CROSSOVER, over_links=()))) == 1


@pytest.mark.parametrize(
    "page",
    [
        lambda: bench.strategies_page(FOUND),
        lambda: bench.traffic_page(Traffic(True, (cell(100.0),), 1, "1%", ())),
        lambda: bench.collectives_page(COLLECTIVES),
        lambda: bench.scaling_page(SCALING),
        lambda: bench.crossover_page(CROSSOVER),
    ],
    ids=["strategies", "traffic", "collectives", "scaling", "crossover"],
)
def test_pages_stand_by_themselves(page) -> None:  # type: ignore[no-untyped-def]
    html = page()
    assert "<li>" in html
    assert "<script" not in html
    assert not re.search(r"(src|href)=[\"']http", html)
    for text in ("<is>", "&amp;lt;"):  # escaped once
        assert text not in html


def test_every_time_on_a_page_is_captioned() -> None:
    for html in (bench.strategies_page(FOUND), bench.collectives_page(COLLECTIVES), bench.scaling_page(SCALING)):
        assert CAPTION in html


def test_progress_words() -> None:
    line = {"round": 2, "warmup": True, "entry": "zero3, p = 8", "step_seconds": 16.9}
    assert bench.step_words(line) == "round 2 (warm-up)  zero3, p = 8: 16.9 s"
    name = {"collective": "reduce_scatter", "partition_size": 4, "hierarchical": True}
    assert bench.measure_words({"kind": "link", "nodes": [0, 1], "bytes_per_second": 47e6}) == (
        "TCP between nodes 0 and 1: 47.0 MB/s"
    )
    assert bench.measure_words({"kind": "fit", **name, "latency_seconds": 0.002}) == (
        "reduce-scatter, p = 4, hierarchical: latency 2.00 ms"
    )
    assert bench.measure_words({"kind": "collective", **name, "message_bytes": 4e6, "seconds": {"median": 0.5}}) == (
        "reduce-scatter, p = 4, hierarchical, 4.0 MB: 500 ms"
    )
