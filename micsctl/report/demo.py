"""What the demo found, as numbers, a table and a page. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from micsctl.report.curve import Curve, largest_loss_difference
from micsctl.report.page import Picture, page
from micsctl.report.plot import losses, traffic
from micsctl.report.table import Table, format_bytes, format_seconds

LOSS_FALLS_BY = 0.4
LOSSES_AGREE_TO = 1e-4
TRAFFIC_AGREES_TO = 0.02
ON_REAL_CLUSTERS = (
    "On real clusters expect less against a ZeRO-3 that overlaps: p3dn 1.4-1.7x, p4d 1.0-1.35x, p5 usually little"
    " (predicted)"
)


@dataclass(frozen=True)
class Stage:
    """Where it ran."""

    level: str
    shaped: bool
    link_mbps: int | None
    nodes: int
    devices: int
    partition_size: int


@dataclass(frozen=True)
class DemoResult(Stage):
    """The demo's last line. Bytes are sent per node and optimizer step, seconds are on emulated links."""

    ok: bool
    seconds: float
    loss_first: float
    loss_last: float
    loss_max_difference: float
    zero3_step_seconds: float
    mics_step_seconds: float
    speedup: float
    traffic_source: str
    zero3_traffic_bytes: float
    zero3_traffic_bytes_formula: float
    mics_traffic_bytes: float
    mics_traffic_bytes_formula: float
    resumed_step: int | None
    leftovers: int


def result(stage: Stage, zero3: Curve, mics: Curve, *, seconds: float, leftovers: int) -> DemoResult:
    """Put the numbers together and judge them. The speed-up is reported, never required."""
    difference = largest_loss_difference(zero3, mics)
    measured = mics.traffic_source == "interface"
    ok = (
        leftovers == 0
        and mics.losses[-1] <= (1 - LOSS_FALLS_BY) * mics.losses[0]
        and difference <= LOSSES_AGREE_TO
        and mics.steps == zero3.steps
        and mics.resumed_step is not None
        and all(not measured or traffic_error(curve) <= TRAFFIC_AGREES_TO for curve in (zero3, mics))
    )
    return DemoResult(
        **vars(stage),
        ok=ok,
        seconds=round(seconds, 1),
        loss_first=mics.losses[0],
        loss_last=mics.losses[-1],
        loss_max_difference=difference,
        zero3_step_seconds=zero3.median_step_seconds,
        mics_step_seconds=mics.median_step_seconds,
        speedup=zero3.median_step_seconds / mics.median_step_seconds,
        traffic_source=mics.traffic_source,
        zero3_traffic_bytes=zero3.median_traffic_bytes,
        zero3_traffic_bytes_formula=zero3.traffic_formula_bytes,
        mics_traffic_bytes=mics.median_traffic_bytes,
        mics_traffic_bytes_formula=mics.traffic_formula_bytes,
        resumed_step=mics.resumed_step,
        leftovers=leftovers,
    )


def traffic_error(curve: Curve) -> float:
    """Relative distance of the measured traffic from its formula."""
    return abs(curve.median_traffic_bytes - curve.traffic_formula_bytes) / curve.traffic_formula_bytes


def caption(stage: Stage) -> str:
    """What the figures are: proof or illustration."""
    source = "Bytes are read at each node's network interface." if stage.shaped else "Bytes are counted in the trainer."
    if not stage.shaped:
        return f"{source} Links are not shaped here, so seconds say nothing about networks."
    return (
        f"{source} Seconds are an illustration: CPU/gloo, emulated {stage.link_mbps} Mbit/s links. {ON_REAL_CLUSTERS}."
    )


def table(stage: Stage, zero3: Curve, mics: Curve) -> Table:
    """zero3 and mics side by side."""
    columns = ("strategy", "sent per node and step", "formula", "difference", "step", "last loss")
    rows = tuple(
        (
            name,
            format_bytes(curve.median_traffic_bytes),
            format_bytes(curve.traffic_formula_bytes),
            f"{(curve.median_traffic_bytes / curve.traffic_formula_bytes - 1):+.2%}",
            format_seconds(curve.median_step_seconds),
            f"{curve.losses[-1]:.4f}",
        )
        for name, curve in (("zero3", zero3), (f"mics, p = {stage.partition_size}", mics))
    )
    less = zero3.median_traffic_bytes / mics.median_traffic_bytes
    title = (
        f"mics sends {less:.1f}x fewer bytes between nodes; losses differ by"
        f" {largest_loss_difference(zero3, mics):.1e} at most"
    )
    return Table(title, columns, rows, frozenset(columns[1:]), caption(stage))


def html(stage: Stage, zero3: Curve, mics: Curve) -> str:
    """demo/report.html."""
    lead = (
        f"The same GPT, data and seed on {stage.nodes} emulated nodes x {stage.devices} devices: once with ZeRO-3 over"
        f" all {stage.nodes * stage.devices} devices, once with MiCS and partition groups of {stage.partition_size}."
    )
    pictures = (
        Picture(
            "Loss",
            losses((zero3, mics)),
            f"The curves lie on each other: they differ by {largest_loss_difference(zero3, mics):.1e} at most. One rank"
            f" of the MiCS run was killed; it went on at step {mics.resumed_step}, from its checkpoint.",
        ),
        Picture("Traffic between nodes", traffic((zero3, mics)), "Dark: what was sent. Light: what the formula says."),
    )
    return page("MiCS and ZeRO-3, side by side", lead, (table(stage, zero3, mics),), pictures)
