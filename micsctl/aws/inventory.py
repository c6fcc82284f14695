"""Everything that AWS holds under a cluster's tag: what `down` must remove, and what it checks afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from micsctl.aws.errors import explained
from micsctl.aws.session import Aws
from micsctl.aws.tags import filters


@dataclass(frozen=True)
class Resource:
    """One thing in AWS."""

    kind: str  # "instance", "volume", "Elastic IP", ...
    id: str
    detail: str  # "p4d.24xlarge, running"; "" where there is nothing to say
    costs_money: bool


@dataclass(frozen=True)
class _Kind:
    name: str
    operation: str
    answer_key: str
    id_key: str
    costs_money: bool
    detail: Callable[[Mapping[str, Any]], str]
    exists: Callable[[Mapping[str, Any]], bool] = lambda raw: True


def _state(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda raw: str(raw.get(key, ""))


_KINDS = (
    _Kind(
        "instance",
        "describe_instances",
        "Reservations",
        "InstanceId",
        True,
        lambda raw: f"{raw['InstanceType']}, {raw['State']['Name']}",
        lambda raw: raw["State"]["Name"] != "terminated",
    ),
    _Kind(
        "volume",
        "describe_volumes",
        "Volumes",
        "VolumeId",
        True,
        lambda raw: f"{raw.get('Size', '?')} GB, {raw.get('State', '')}",
        lambda raw: raw.get("State") not in ("deleting", "deleted"),
    ),
    _Kind("Elastic IP", "describe_addresses", "Addresses", "AllocationId", True, _state("PublicIp")),
    _Kind(
        "network interface",
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
        False,
        _state("Description"),
    ),
    _Kind(
        "placement group",
        "describe_placement_groups",
        "PlacementGroups",
        "GroupName",
        False,
        _state("State"),
        lambda raw: raw.get("State") != "deleted",
    ),
    _Kind("security group", "describe_security_groups", "SecurityGroups", "GroupId", False, _state("GroupName")),
    _Kind("key pair", "describe_key_pairs", "KeyPairs", "KeyName", False, _state("KeyType")),
    _Kind("subnet", "describe_subnets", "Subnets", "SubnetId", False, _state("AvailabilityZone")),
    _Kind("internet gateway", "describe_internet_gateways", "InternetGateways", "InternetGatewayId", False, _state("")),
    _Kind("VPC", "describe_vpcs", "Vpcs", "VpcId", False, _state("CidrBlock")),
)
# operations that answer everything at once
_NOT_PAGED = frozenset({"describe_addresses", "describe_placement_groups", "describe_key_pairs"})


def resources(aws: Aws, cluster: str) -> list[Resource]:
    """Every existing resource that carries the cluster's tag, in the order of the kinds above."""
    return [
        Resource(kind.name, str(raw[kind.id_key]), kind.detail(raw), kind.costs_money)
        for kind in _KINDS
        for raw in _list(aws, kind, cluster)
        if kind.exists(raw)
    ]


def _list(aws: Aws, kind: _Kind, cluster: str) -> Iterable[Mapping[str, Any]]:
    with explained(f"list what is left ({kind.name})"):
        if kind.operation in _NOT_PAGED:
            found = list(getattr(aws.ec2, kind.operation)(Filters=filters(cluster))[kind.answer_key])
        else:
            pages = aws.ec2.get_paginator(kind.operation).paginate(Filters=filters(cluster))
            found = [raw for page in pages for raw in page[kind.answer_key]]
    if kind.answer_key == "Reservations":
        return [raw for reservation in found for raw in reservation["Instances"]]
    return found


def summary(found: Iterable[Resource]) -> str:
    """One line for each kind, for an error's `costs`: "2 instances: i-1 (p4d.24xlarge, running), i-2 (...)"."""
    by_kind: dict[str, list[Resource]] = {}
    for resource in found:
        by_kind.setdefault(resource.kind, []).append(resource)
    return "\n".join(
        f"{len(several)} {kind if len(several) == 1 else kind + 's'}: {', '.join(_name(one) for one in several)}"
        for kind, several in by_kind.items()
    )


def _name(resource: Resource) -> str:
    return f"{resource.id} ({resource.detail})" if resource.detail else resource.id
