"""Instance types: what one has, and where it is offered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from micsctl.aws.errors import explained
from micsctl.aws.session import Aws
from micsctl.errors import UsageError

_ALTERNATIVES = ("p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge")


@dataclass(frozen=True)
class InstanceType:
    """The facts about an instance type that `up` needs."""

    name: str
    gpus: int
    efa_cards: tuple[int, ...]  # indices of the network cards that take an EFA interface
    cluster_placement: bool  # may stand in a cluster placement group
    nitro: bool  # its console can be read while it runs


def parse_type(raw: Mapping[str, Any]) -> InstanceType:
    """From one element of DescribeInstanceTypes."""
    network = raw.get("NetworkInfo", {})
    cards = sorted(network.get("NetworkCards") or [{}], key=lambda card: int(card.get("NetworkCardIndex", 0)))
    return InstanceType(
        name=raw["InstanceType"],
        gpus=sum(int(gpu["Count"]) for gpu in raw.get("GpuInfo", {}).get("Gpus", ())),
        efa_cards=_efa_cards(cards, int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0))),
        cluster_placement="cluster" in raw.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
        nitro=raw.get("Hypervisor") == "nitro" or bool(raw.get("BareMetal")),
    )


def _efa_cards(cards: list[Mapping[str, Any]], limit: int) -> tuple[int, ...]:
    """Each card says so itself; where it does not, the last `limit` cards (a card without EFA is card 0)."""
    indices = [int(card.get("NetworkCardIndex", 0)) for card in cards]
    if any("InterfaceTypes" in card for card in cards):
        indices = [index for index, card in zip(indices, cards, strict=True) if "efa" in card.get("InterfaceTypes", ())]
    return tuple(indices[max(0, len(indices) - limit) :])


def find_type(aws: Aws, name: str) -> InstanceType:
    """Raises UsageError where the region does not offer the type; it names GPU types that the region does offer."""
    offered = _offered(aws, (name, *_ALTERNATIVES), "region")
    if name not in offered:
        others = ", ".join(sorted(offered)) or "none of the known GPU types"
        raise UsageError(
            f"{aws.settings.region} does not offer {name}",
            f"it offers {others}",
            next="set cluster.type or cluster.region in mics.yaml",
        )
    with explained(f"look up {name}"):
        answer = aws.ec2.describe_instance_types(InstanceTypes=[name])
    return parse_type(answer["InstanceTypes"][0])


def zones_of(aws: Aws, name: str) -> tuple[str, ...]:
    """Availability zones that offer the type, sorted; local and wavelength zones left out."""
    with explained("list the availability zones"):
        zones = aws.ec2.describe_availability_zones()["AvailabilityZones"]
    usable = {
        zone["ZoneName"]
        for zone in zones
        if zone.get("ZoneType", "availability-zone") == "availability-zone" and zone["State"] == "available"
    }
    return tuple(sorted(usable & _offered(aws, (name,), "availability-zone").get(name, frozenset())))


def _offered(aws: Aws, names: tuple[str, ...], location_type: str) -> dict[str, frozenset[str]]:
    """Instance type -> locations that offer it."""
    wanted = [{"Name": "instance-type", "Values": sorted(set(names))}]
    found: dict[str, set[str]] = {}
    with explained("ask where the instance type is offered"):
        pages = aws.ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType=location_type, Filters=wanted
        )
        for offering in (offering for page in pages for offering in page["InstanceTypeOfferings"]):
            found.setdefault(offering["InstanceType"], set()).add(offering["Location"])
    return {name: frozenset(locations) for name, locations in found.items()}
