"""Plots as SVG text, with matplotlib (extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from micsctl.errors import UsageError
from micsctl.report.curve import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = "#fdfcf9"  # as the page of templates/report.html.j2
_SOURCES = {"interface": "at the interface", "counted": "counted in the trainer"}
COLOURS = ("#b3541e", "#1f5f8b", "#4f7942", "#6b4c8a")


def losses(curves: Sequence[Curve]) -> str:
    """Loss over steps, overlaid: equal curves lie on each other, so the first is drawn wide, the later ones dashed."""
    figure, axes = figure_of(7.5, 3.6)
    for number, curve in enumerate(curves):
        style: dict[str, Any] = (
            {"linewidth": 5, "alpha": 0.35} if number == 0 else {"linewidth": 1.8, "linestyle": "--"}
        )
        axes.plot(curve.steps, curve.losses, color=COLOURS[number % 4], label=curve.strategy, **style)
        if curve.resumed_step:
            axes.axvline(curve.resumed_step - 0.5, color="#888888", linewidth=1, linestyle=":")
            axes.annotate(
                "resumed from here after the kill", (curve.resumed_step - 0.5, max(curve.losses)), xytext=(4, -8),
                textcoords="offset points", fontsize=9, color="#666666",
            )  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    return svg(figure)


def traffic(curves: Sequence[Curve]) -> str:
    """Bytes sent per node and step: what was measured beside the formula."""
    figure, axes = figure_of(7.5, 1.0 + 0.8 * len(curves))
    for number, curve in enumerate(curves):
        measured, formula = curve.median_traffic_bytes / 1e6, curve.traffic_formula_bytes / 1e6
        axes.barh(number - 0.19, measured, height=0.36, color=COLOURS[number % 4], label=None)
        axes.barh(number + 0.19, formula, height=0.36, color=COLOURS[number % 4], alpha=0.35)
        axes.text(
            measured, number - 0.19, f" {measured:.1f} MB {_SOURCES[curve.traffic_source]}", va="center", fontsize=9
        )
        axes.text(formula, number + 0.19, f" {formula:.1f} MB formula", va="center", fontsize=9, color="#666666")
    axes.set_yticks(range(len(curves)), [curve.strategy for curve in curves])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(max(c.median_traffic_bytes, c.traffic_formula_bytes) for c in curves) / 1e6)
    axes.set_xlabel("MB sent per node and optimizer step")
    return svg(figure)


def require_matplotlib() -> type[Figure]:
    """Raises UsageError where it is not installed: call it before work whose result is to be plotted."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib", "it is not installed", next="pip install 'micsctl[report]'") from None
    return Figure


def figure_of(width: float, height: float) -> tuple[Figure, Any]:
    figure = require_matplotlib()(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(_PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", facecolor=_PAPER, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
