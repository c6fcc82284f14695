"""Measurements as mics.bench writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from micsctl.bench.model import Site

SHAPED = Site(
    nodes=4, ranks_per_node=2, level="netns", link_mbps=400, mtu_bytes=9001, device="cpu", free_memory_bytes=24e9
)


def line(entry: str, number: int, seconds: float, *, loss: float | None = 5.0, warmup: bool = False) -> dict[str, Any]:
    return {
        "step": 1,
        "round": number,
        "warmup": warmup,
        "entry": entry,
        "step_seconds": seconds,
        "loss": loss,
        "traffic_bytes": 1000.0,
        "counted_bytes": None,
        "samples": 8,
        "tokens_per_second": 1.0,
    }


def lines(seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each entry's seconds, round by round; the first round warms up."""
    return [
        line(entry, number, value, warmup=number == 1)
        for entry, values in seconds.items()
        for number, value in enumerate(values, 1)
    ]


@pytest.fixture
def site() -> Site:
    return SHAPED
