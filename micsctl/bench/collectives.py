"""From the lines of mics.measure to a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mics.probes import MeasureConfig, cells

from micsctl.bench.model import Collective, Collectives, Rate, Site, Spread


def measurements(config: MeasureConfig, site: Site) -> int:
    """How many lines there will be: the links, each cell at each size, and each cell's fit."""
    count = len(cells(config, world_size=site.world_size, devices_per_node=site.ranks_per_node))
    links = math.comb(site.nodes, 2) if config.pairs else min(1, site.nodes - 1)
    return count * (len(config.message_bytes) + 1) + (links if config.tcp_seconds > 0 else 0)


def result(lines: Sequence[Mapping[str, Any]], site: Site) -> Collectives:
    tcp = next((line["bytes_per_second"] for line in lines if line["kind"] == "link"), None)
    found: dict[tuple[str, int, bool], list[Mapping[str, Any]]] = {}
    for line in lines:
        if line["kind"] != "link":
            found.setdefault((line["collective"], line["partition_size"], line["hierarchical"]), []).append(line)
    return Collectives(
        nodes=site.nodes,
        ranks_per_node=site.ranks_per_node,
        link_mbps=site.link_mbps,
        tcp_bytes_per_second=tcp,
        rows=tuple(_collective(key, of_one, tcp) for key, of_one in found.items()),
        caption=site.caption,
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
    return Rate(line["message_bytes"], line["repeats"], Spread(**line["seconds"]), rate, share)
