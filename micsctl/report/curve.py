"""One run's metrics.jsonl as numbers, and two of them side by side. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Curve:
    """The steps of one run, in order; a resumed run's steps replace those that it repeated."""

    strategy: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]  # NaN where a step had none that is finite
    step_seconds: tuple[float, ...]
    traffic_bytes: tuple[float, ...]  # sent per node, mean over nodes
    traffic_formula_bytes: float
    traffic_source: str  # "interface" or "counted"
    resumed_step: int | None = None  # first step after a resume

    @property
    def median_step_seconds(self) -> float:
        """Without the first step, which pays for the start."""
        return median(self.step_seconds[1:] or self.step_seconds)

    @property
    def median_traffic_bytes(self) -> float:
        return median(self.traffic_bytes[1:] or self.traffic_bytes)


def parse_metrics(text: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that is cut short is left out."""
    lines = text.splitlines()
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            parsed.append(json.loads(line))
        except ValueError:
            if number != len(lines) - 1:
                raise
    return parsed


def curve(strategy: str, attempts: Sequence[Iterable[dict[str, Any]]]) -> Curve:
    """The curve of a run and its resumed attempts, oldest first. Raises ValueError where no step was made."""
    by_step: dict[int, dict[str, Any]] = {}
    resumed: int | None = None
    for number, attempt in enumerate(attempts):
        lines = list(attempt)
        if number and lines:
            resumed = lines[0]["step"]
            by_step = {step: line for step, line in by_step.items() if step < lines[0]["step"]}
        by_step |= {line["step"]: line for line in lines}
    if not by_step:
        raise ValueError(f"run of strategy {strategy} made no step")
    lines = [by_step[step] for step in sorted(by_step)]
    return Curve(
        strategy=strategy,
        steps=tuple(line["step"] for line in lines),
        losses=tuple(math.nan if line["loss"] is None else line["loss"] for line in lines),
        step_seconds=tuple(line["step_seconds"] for line in lines),
        traffic_bytes=tuple(line["traffic_bytes"] for line in lines),
        traffic_formula_bytes=lines[-1]["traffic_formula_bytes"],
        traffic_source=lines[-1]["traffic_source"],
        resumed_step=resumed,
    )


def largest_loss_difference(one: Curve, other: Curve) -> float:
    """Over the steps that both made; infinite where one has no finite loss. Raises ValueError where they share none."""
    losses = dict(zip(other.steps, other.losses, strict=True))
    differences = [abs(a - losses[s]) for s, a in zip(one.steps, one.losses, strict=True) if s in losses]
    if not differences:
        raise ValueError("the two runs share no step")
    return max(math.inf if math.isnan(difference) else difference for difference in differences)
