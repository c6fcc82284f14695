"""From the lines of mics.measure to a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mics.probes import MeasureConfig, cells

from micsctl.bench.model import Collective, Collectives, Place, Rate, Spread


def measurements(config: MeasureConfig, place: Place) -> int:
    """How many lines there will be: the link, each cell at each size, and each cell's fit."""
    count = len(cells(config, world_size=place.world_size, devices_per_node=place.ranks_per_node))
    return count * (len(config.message_bytes) + 1) + (place.nodes > 1 and config.tcp_seconds > 0)


def result(lines: Sequence[Mapping[str, Any]], place: Place) -> Collectives:
    tcp = next((line["bytes_per_second"] for line in lines if line["kind"] == "link"), None)
    found: dict[tuple[str, int, bool], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] != "link":
            found.setdefault((line["collective"], line["partition_size"], line["hierarchical"]), []).append(line)
    return Collectives(
        nodes=place.nodes,
        ranks_per_node=place.ranks_per_node,
        link_mbps=place.link_mbps,
        tcp_bytes_per_second=tcp,
        rows=tuple(_collective(key, of_one, tcp) for key, of_one in found.items()),
        caption=place.caption,
    )


def _collective(key: tuple[str, int, bool], lines: Sequence[Mapping[str, Any]], tcp: float | None) -> Collective:
    fit: Mapping[str, Any] = next((line for line in lines if line["kind"] == "fit"), {})
    return Collective(
        collective=key[0],
        partition_size=key[1],
        hierarchical=key[2],
        latency_seconds=fit.get("latency_seconds"),
        bytes_per_second=fit.get("bytes_per_second"),
        bus_bytes_per_second=fit.get("bus_bytes_per_second"),
        rates=tuple(_rate(line, tcp) for line in lines if line["kind"] == "collective"),
    )


def _rate(line: Mapping[str, Any], tcp: float | None) -> Rate:
    rate = line["bytes_per_second"]
    share = rate / tcp if rate and tcp else None
    return Rate(line["message_bytes"], Spread(**line["seconds"]), rate, share)
