"""What a benchmark found, as tables, sentences and a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from micsctl.bench.model import (
    PAYS_FROM,
    Collectives,
    Crossover,
    Point,
    Row,
    Scaling,
    Spread,
    Strategies,
    Traffic,
    TrafficCell,
)
from micsctl.report import bench_plot
from micsctl.report.demo import ON_REAL_CLUSTERS
from micsctl.report.page import Picture, page
from micsctl.report.table import Table, format_bytes, format_count, format_seconds

_page = partial(page, template="bench.html.j2")
_YES = {True: "yes", False: ""}
_BELOW_BOUND = 0.95  # a step that is quicker than without the link: a spread of the machine, not of the network
_COUNTED = "Bytes were counted by mics' own communicators, as these nodes have no interface to read"


def step_words(line: Mapping[str, Any]) -> str:
    """A line of mics.bench, for whoever waits."""
    warmup = " (warm-up)" if line["warmup"] else ""
    return f"round {line['round']}{warmup}  {line['entry']}: {format_seconds(line['step_seconds'])}"


def measure_words(line: Mapping[str, Any]) -> str:
    """A line of mics.measure, for whoever waits."""
    if line["kind"] == "link":
        return f"TCP between nodes {line['nodes'][0]} and {line['nodes'][1]}: {_rate(line['bytes_per_second'])}"
    name = f"{line['collective'].replace('_', '-')}, p = {line['partition_size']}"
    name += ", hierarchical" if line["hierarchical"] else ""
    if line["kind"] == "fit":
        return f"{name}: latency {_latency(line['latency_seconds'])}"
    return f"{name}, {format_bytes(line['message_bytes'])}: {format_seconds(line['seconds']['median'])}"


def strategies(found: Strategies) -> Table:
    columns = (
        "strategy", "p", "hierarchical", "reduce-scatter", "step (min - max)", "unshaped", "/ bound", "sent per node",
        "formula", "difference", "over zero3", "loss",
    )  # fmt: skip
    rows = tuple(
        (
            row.strategy,
            str(row.partition_size),
            _YES[row.hierarchical],
            row.reduce_scatter,
            _spread(row.step_seconds),
            _or_dash(row.unshaped_step_seconds, format_seconds),
            _or_dash(row.step_over_bound, "{:.2f}".format),
            _or_dash(row.traffic_bytes, format_bytes),
            format_bytes(row.traffic_formula_bytes),
            _or_dash(row.traffic_difference, "{:+.2%}".format),
            _or_dash(row.speedup_vs_zero3, "{:.2f}x".format),
            f"{row.loss:.5f}",
        )
        for row in found.rows
    )
    title = (
        f"{format_count(found.parameters)} parameters, {found.nodes} nodes x {found.ranks_per_node} ranks, "
        f"{found.micro_steps} micro-steps of {found.micro_batch} x {found.sequence} tokens per rank"
    )
    how = "interleaved steps" if found.interleaved else "steps, one strategy after the other for want of memory,"
    caption = (
        f"Times: {found.caption}; medians of {found.steps} {how} after {found.warmup_steps}. "
        "Bound: the same step on unshaped links, or traffic / link, whichever is longer. "
        "Sent: per node and optimizer step; the formula has payload only."
    )
    if _counted(found.rows):
        caption += f" {_COUNTED}."
    return Table(title, columns, rows, frozenset(columns[1:]) - {"hierarchical", "reduce-scatter"}, caption)


def verdict(found: Strategies) -> tuple[str, ...]:
    """What the table says, in sentences; what is proof and what illustration."""
    claims = () if found.emulated and found.link_mbps is None else found.claims  # seconds that say nothing
    lines = [
        f"{claim.fast} is {claim.ratio:.2f}x as fast as {claim.slow}" + (f" ({claim.note})" if claim.note else "")
        for claim in claims
    ]
    if any("headline" in claim.note for claim in claims):
        lines.append(
            "Equal memory: compared are those that hold no more bytes on a device than mics at p = k, in model states,"
            " gathered weights that stay and second copies. Speed-ups are medians of the ratios within each round."
        )
    agree = f"largest relative difference {found.largest_loss_difference:.1e}, of {found.losses_agree_to:.0e} allowed"
    lines.append(f"The losses are equal ({agree})" if found.losses_equal else f"THE LOSSES DIFFER ({agree})")
    if found.emulated:
        proof = (
            f"Losses are proof. {_COUNTED}. Seconds are"
            if _counted(found.rows)
            else "Bytes and losses are proof, seconds"
        )
        lines.append(f"{proof} an illustration: {found.caption}. {ON_REAL_CLUSTERS}")
    if any(row.step_over_bound is not None and row.step_over_bound < _BELOW_BOUND for row in found.rows):
        lines.append("/ bound below 1: the machine was busier while links were not shaped; measure again")
    if found.on_cpu and any(row.strategy.startswith(("fsdp2", "deepspeed")) for row in found.rows):
        lines.append(
            "On CPU FSDP2 and DeepSpeed wait in each collective while mics computes on; on GPUs all of them overlap"
        )
    return (*lines, *found.left_out)


def traffic(found: Traffic) -> Table:
    columns = ("strategy", "nodes x ranks", "p", "s", "sent per node", "formula", "difference", "")
    rows = tuple(
        (
            cell.name,
            f"{cell.nodes} x {cell.devices_per_node}",
            str(cell.partition_size),
            str(cell.micro_steps),
            _or_dash(cell.traffic_bytes, format_bytes),
            format_bytes(cell.traffic_formula_bytes),
            _or_dash(cell.difference, "{:+.2%}".format),
            _judgement(cell),
        )
        for cell in found.cells
    )
    title = f"bytes that leave a node in an optimizer step, {format_count(found.parameters)} parameters"
    return Table(title, columns, rows, frozenset(columns[2:-1]), f"Allowed: {found.allowance}.")


def _judgement(cell: TrafficCell) -> str:
    if cell.traffic_bytes is None:
        return "not measured"
    return "ok" if cell.ok else "OUTSIDE"


def traffic_verdict(found: Traffic) -> tuple[str, ...]:
    measured = [cell for cell in found.cells if cell.traffic_bytes is not None]
    bad = [cell for cell in measured if not cell.ok]
    said = f"{len(measured) - len(bad)} of {len(measured)} measured cells agree with the formula"
    worst = max((abs(cell.difference) for cell in measured if cell.difference is not None), default=0.0)
    return (f"{said}; the largest difference is {worst:.2%}", *found.left_out)


def collectives(found: Collectives) -> Table:
    sizes = sorted({rate.message_bytes for row in found.rows for rate in row.rates})
    columns = ("collective", "latency", "rate", *(f"{size >> 20} MiB" for size in sizes))
    rows = []
    for row in found.rows:
        by_size = {rate.message_bytes: rate for rate in row.rates}
        shares = [by_size[size].share_of_tcp if size in by_size else None for size in sizes]
        rate = row.bytes_per_second or row.bus_bytes_per_second
        per = " per node" if row.bytes_per_second else " per device, inside"
        rows.append(
            (
                row.name,
                _or_dash(row.latency_seconds, _latency),
                _rate(rate) + per if rate else "-",
                *(_or_dash(share, "{:.0%}".format) for share in shares),
            )
        )
    tcp = found.tcp_bytes_per_second
    title = f"{found.nodes} nodes x {found.ranks_per_node} ranks" + (f", one TCP stream: {_rate(tcp)}" if tcp else "")
    repeats = sorted({rate.repeats for row in found.rows for rate in row.rates})
    many = " to ".join(str(count) for count in dict.fromkeys((repeats[0], repeats[-1]))) if repeats else "no"
    caption = (
        f"{found.caption}. Medians of {many} repeats. By message size: bytes that leave a node per second, as a share "
        "of the single TCP stream. Latency and rate: the line through the times at all sizes."
    )
    return Table(title, columns, tuple(rows), frozenset(columns[1:]), caption)


def collectives_verdict(found: Collectives) -> tuple[str, ...]:
    """The weakest share of the TCP stream from 4 MiB up, by form."""
    lines = []
    for hierarchical, form in ((False, "flat"), (True, "hierarchical")):
        shares = [
            (rate.share_of_tcp, row.name, rate.message_bytes)
            for row in found.rows
            for rate in row.rates
            if row.hierarchical is hierarchical and rate.share_of_tcp is not None and rate.message_bytes >= 4 << 20
        ]
        if shares:
            share, name, size = min(shares)
            lines.append(f"{form}: from 4 MiB up at least {share:.0%} of one TCP stream ({name}, {size >> 20} MiB)")
    return tuple(lines)


def scaling(found: Scaling) -> Table:
    columns = (
        "nodes", "weak step (min - max)", "weak efficiency", "strong step (min - max)", "s", "strong efficiency",
        "compute : hop 2", "planned",
    )  # fmt: skip
    rows = tuple(
        (
            str(row.nodes),
            _spread(row.weak_step_seconds),
            f"{row.weak_efficiency:.1%}",
            _spread(row.strong_step_seconds),
            str(row.strong_micro_steps),
            f"{row.strong_efficiency:.1%}",
            _or_dash(row.compute_per_hop2, "{:.2f}".format),
            _or_dash(row.planned_compute_per_hop2, "{:.2f}".format),
        )
        for row in found.rows
    )
    title = (
        f"mics, p = {found.partition_size}, {format_count(found.parameters)} parameters, "
        f"{found.ranks_per_node} ranks a node"
    )
    rounds = "one round" if found.rounds == 1 else f"medians over {found.rounds} rounds"
    caption = (
        f"Times: {found.caption}; {rounds} of jobs of {found.steps} steps. "
        f"Weak: {found.rows[0].weak_micro_steps} micro-steps per rank. Strong: s of them, the same batch in all."
    )
    return Table(title, columns, rows, frozenset(columns), caption)


def crossover(found: Crossover) -> Table:
    columns = ("", "zero3's compute : communication", "mics over zero3")
    rows = tuple(
        (point.what, f"{point.compute_per_traffic:.2f}", f"{point.speedup:.2f}x") for point in _all_points(found)
    )
    title = f"mics (p = {found.ranks_per_node}) over zero3, {found.nodes} nodes x {found.ranks_per_node} ranks"
    caption = (
        f"{found.caption}. Communication: what zero3's traffic needs on the link alone. Predicted: the time model."
    )
    return Table(title, columns, rows, frozenset(columns[1:]), caption)


def _all_points(found: Crossover) -> tuple[Point, ...]:
    return (*found.over_links, *found.over_compute, *found.predicted)


def crossover_verdict(found: Crossover) -> tuple[str, ...]:
    return (
        *_stops("Over link speeds", found.over_links, found.stops_over_links),
        *_stops("Over emulated compute", found.over_compute, found.stops_over_compute),
    )


def _stops(over: str, points: Sequence[Point], at: float | None) -> tuple[str, ...]:
    if not points:
        return ()
    if at is None:
        most = max(point.compute_per_traffic for point in points)
        return (
            f"{over}: mics is at least {PAYS_FROM}x as fast as zero3, up to a compute : communication of {most:.2f}",
        )
    if not at:
        return (f"{over}: mics is nowhere {PAYS_FROM}x as fast as zero3",)
    return (
        f"{over}: mics is less than {PAYS_FROM}x as fast as zero3 where computing takes more than {at:.2f} times"
        " what zero3's traffic needs on the link",
    )


def strategies_page(found: Strategies) -> str:
    pictures = (
        Picture("Step time", bench_plot.steps(found), f"Lines: from the fastest to the slowest step. {found.caption}."),
        Picture("Traffic", bench_plot.traffic(found), "Dark: what was sent. Light: the formula, payload only."),
    )
    turns = ", one step of each in every round" if found.interleaved else ", one after the other"
    lead = f"Each strategy trains the same model on the same data and links{turns}."
    return _page("Strategies, side by side", lead, (strategies(found),), pictures, verdict(found))


def traffic_page(found: Traffic) -> str:
    return _page(
        "Traffic, measured against its formula",
        "Bytes are read at each node's network interface, where it has one of its own.",
        (traffic(found),),
        (),
        traffic_verdict(found),
    )


def collectives_page(found: Collectives) -> str:
    picture = Picture("Rate over size", bench_plot.rates(found), f"Bytes that leave a node. {found.caption}.")
    verdict = collectives_verdict(found)
    return _page("Collectives", "Flat and in two stages, over all groups.", (collectives(found),), (picture,), verdict)


def scaling_page(found: Scaling) -> str:
    picture = Picture("Efficiency", bench_plot.efficiency(found), f"Against the fewest nodes. {found.caption}.")
    return _page("Scaling", "The same job on more nodes.", (scaling(found),), (picture,), found.notes)


def crossover_page(found: Crossover) -> str:
    picture = Picture("Where it stops paying", bench_plot.crossover(found), f"Measured: {found.caption}.")
    lead = "How much faster mics is than zero3, over how long computing takes against communication."
    return _page("Where it stops paying", lead, (crossover(found),), (picture,), crossover_verdict(found))


def _counted(rows: Sequence[Row]) -> bool:
    return any(row.traffic_source == "counted" for row in rows)


def _spread(spread: Spread) -> str:
    low, high = format_seconds(spread.min), format_seconds(spread.max)
    return f"{format_seconds(spread.median)} ({low} - {high})"


def _latency(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds > 0 else "not seen"


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def _or_dash(value: Any, written: Any) -> str:
    return "-" if value is None else written(value)
