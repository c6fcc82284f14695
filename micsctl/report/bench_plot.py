"""Plots of benchmarks, as SVG text."""

from __future__ import annotations

from micsctl.bench.model import PAYS_FROM, Collectives, Crossover, Point, Row, Scaling, Strategies
from micsctl.report.plot import COLOURS, figure_of, svg

_MARKERS = "os^Dvx"


def steps(found: Strategies) -> str:
    """Median step of each strategy, with its spread."""
    figure, axes = figure_of(7.5, 1.0 + 0.36 * len(found.rows))
    for place, row in enumerate(found.rows):
        seconds = row.step_seconds
        away = [[seconds.median - seconds.min], [seconds.max - seconds.median]]
        axes.barh(place, seconds.median, height=0.6, color=_colour(row), xerr=away, ecolor="#666666")
        axes.text(seconds.max, place, f"  {seconds.median:.2f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(found.rows)), [row.name for row in found.rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(row.step_seconds.max for row in found.rows))
    axes.set_xlabel(f"seconds per optimizer step ({found.caption})")
    return svg(figure)


def traffic(found: Strategies) -> str:
    """Bytes sent per node and step: what was measured on the formula."""
    figure, axes = figure_of(7.5, 1.0 + 0.36 * len(found.rows))
    for place, row in enumerate(found.rows):
        axes.barh(place + 0.2, row.traffic_formula_bytes / 1e6, height=0.36, color=_colour(row), alpha=0.35)
        if row.traffic_bytes is not None:
            axes.barh(place - 0.2, row.traffic_bytes / 1e6, height=0.36, color=_colour(row))
    axes.set_yticks(range(len(found.rows)), [row.name for row in found.rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("MB sent per node and optimizer step")
    return svg(figure)


def rates(found: Collectives) -> str:
    """Bytes that leave a node per second over the message's size, beside the single TCP stream."""
    figure, axes = figure_of(7.5, 4.2)
    collectives = list(dict.fromkeys(row.collective for row in found.rows))
    partition_sizes = sorted({row.partition_size for row in found.rows})
    for row in (row for row in found.rows if row.bytes_per_second):
        points = [(rate.message_bytes / 2**20, rate.bytes_per_second) for rate in row.rates if rate.bytes_per_second]
        sizes, speeds = zip(*points, strict=True)
        style = "-" if row.hierarchical else "--"
        axes.plot(
            sizes, [speed / 1e6 for speed in speeds], style, markersize=4, label=row.name,
            marker=_MARKERS[partition_sizes.index(row.partition_size) % len(_MARKERS)],
            color=COLOURS[collectives.index(row.collective) % len(COLOURS)],
        )  # fmt: skip
    if found.tcp_bytes_per_second:
        axes.axhline(found.tcp_bytes_per_second / 1e6, color="#888888", linestyle=":", label="one TCP stream")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("message, MiB")
    axes.set_ylabel("MB/s that leave a node")
    axes.legend(frameon=False, fontsize=8)
    return svg(figure)


def efficiency(found: Scaling) -> str:
    figure, axes = figure_of(7.5, 3.6)
    nodes = [row.nodes for row in found.rows]
    axes.plot(nodes, [100 * row.weak_efficiency for row in found.rows], marker="o", color=COLOURS[0], label="weak")
    axes.plot(nodes, [100 * row.strong_efficiency for row in found.rows], marker="o", color=COLOURS[1], label="strong")
    axes.axhline(100, color="#888888", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes")
    axes.set_ylabel("efficiency, %")
    axes.legend(frameon=False)
    return svg(figure)


def crossover(found: Crossover) -> str:
    """Speed-up over compute : communication, measured and predicted."""
    figure, axes = figure_of(7.5, 4.2)
    series = (
        ("measured, over link speeds", found.over_links, "o-"),
        ("measured, over emulated compute", found.over_compute, "s--"),
    )
    for number, (name, points, style) in enumerate(series):
        ordered = sorted(points, key=lambda point: point.compute_per_traffic)
        if ordered:
            axes.plot(
                [point.compute_per_traffic for point in ordered], [point.speedup for point in ordered], style,
                markersize=5, color=COLOURS[number], label=name,
            )  # fmt: skip
    for number, type in enumerate(dict.fromkeys(_type(point) for point in found.predicted)):
        points = tuple(point for point in found.predicted if _type(point) == type)
        axes.plot(
            [point.compute_per_traffic for point in points], [point.speedup for point in points], "D",
            markersize=5, color=COLOURS[2], alpha=(1.0, 0.6, 0.3)[number % 3], label=f"predicted, {type}",
        )  # fmt: skip
    axes.axhspan(0, PAYS_FROM, color="#888888", alpha=0.12, linewidth=0, label=f"below {PAYS_FROM}x: not worth it")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of compute : seconds that zero3's traffic needs on the link")
    axes.set_ylabel("step of zero3 / step of mics (p = k)")
    axes.legend(frameon=False, fontsize=9, title="measured: CPU/gloo, emulated link", title_fontsize=8)
    return svg(figure)


def _type(point: Point) -> str:
    """The instance type of a prediction."""
    return point.what.split(",")[0]


def _colour(row: Row) -> str:
    """mics, and the rest."""
    return COLOURS[0] if row.strategy.startswith("mics") else COLOURS[1]
