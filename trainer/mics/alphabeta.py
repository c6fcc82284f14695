"""Latency and rate of a collective from its times at several sizes. Pure, standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]  # bytes, seconds
_MISSED = 0.25  # of its own seconds: an outlier is missed by more
_BETTER = 3.0  # and without it the line fits the others so many times better


@dataclass(frozen=True)
class Line:
    """seconds = latency_seconds + bytes * seconds_per_byte; neither is negative.

    outlier  the point that it leaves out
    """

    latency_seconds: float
    seconds_per_byte: float
    outlier: Point | None = None

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes * self.seconds_per_byte


def fit(points: Sequence[Point]) -> Line:
    """The line with the least sum of squared relative errors, over all points or all but one.

    One point is left out, of four or more, where the line through the others misses it widely and fits them much
    better than a line through all. Relative errors, as times span orders of magnitude: the usual form would see the
    largest messages alone.

    Raises ValueError without two sizes, or where a size or a time is not positive.
    """
    if len({size for size, _ in points}) < 2 or any(size <= 0 or seconds <= 0 for size, seconds in points):
        raise ValueError(f"a line needs two different sizes, and positive sizes and seconds, got {list(points)}")
    whole = _least_squares(points)
    if len(points) < 4:
        return whole
    without = [(left, _least_squares(rest)) for left, rest in _each_left_out(points)]
    outlier, line = min(without, key=lambda found: _error(found[1], [p for p in points if p is not found[0]]))
    rest = [point for point in points if point is not outlier]
    if abs(_miss(line, outlier)) > _MISSED and _error(line, rest) * _BETTER < _error(whole, points):
        return Line(line.latency_seconds, line.seconds_per_byte, outlier)
    return whole


def _each_left_out(points: Sequence[Point]) -> list[tuple[Point, list[Point]]]:
    every = [(point, [other for other in points if other is not point]) for point in points]
    return [(point, rest) for point, rest in every if len({size for size, _ in rest}) > 1]


def _least_squares(points: Sequence[Point]) -> Line:
    weights = [1 / seconds**2 for _, seconds in points]
    total = math.fsum(weights)
    x = math.fsum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = math.fsum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    covariance = math.fsum(w * (size - x) * (s - y) for w, (size, s) in zip(weights, points, strict=True))
    slope = covariance / math.fsum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    if slope < 0:  # the best line without a slope, and below without a latency
        return Line(math.fsum(1 / s for _, s in points) / total, 0.0)
    if y < slope * x:
        by_size = [size / seconds for size, seconds in points]
        return Line(0.0, math.fsum(by_size) / math.fsum(v**2 for v in by_size))
    return Line(y - slope * x, slope)


def _miss(line: Line, point: Point) -> float:
    size, seconds = point
    return line.seconds(size) / seconds - 1


def _error(line: Line, points: Sequence[Point]) -> float:
    return math.sqrt(math.fsum(_miss(line, point) ** 2 for point in points) / len(points))
