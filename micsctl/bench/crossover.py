"""Where it stops paying: speed-up over compute : communication. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from micsctl.bench.model import PAYS_FROM, Point

LINKS_MBPS = "100,200,400,800,1600,3200"
COMPUTE_LINK_MBPS = 1600  # of the points with emulated compute
COMPUTE_PER_TRAFFIC = (1.0, 2.0, 4.0)  # these points, against what zero3's traffic needs on that link


def stops_at(points: Sequence[Point], level: float = PAYS_FROM) -> float | None:
    """The compute : communication from which on no point reaches the level; None where the last one still does.

    Between the last point that reaches it and the next one, by a line over the logarithm of x. 0 where none does.
    """
    ordered = sorted(points, key=lambda point: point.compute_per_traffic)
    above = [number for number, point in enumerate(ordered) if point.speedup >= level]
    if not above:
        return 0.0 if ordered else None
    if above[-1] == len(ordered) - 1:
        return None
    last, following = ordered[above[-1]], ordered[above[-1] + 1]
    share = (last.speedup - level) / (last.speedup - following.speedup)
    x, y = math.log(last.compute_per_traffic), math.log(following.compute_per_traffic)
    return math.exp(x + share * (y - x))
