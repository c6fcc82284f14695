"""Elastic IPs: one for the head node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from micsctl.aws.create import Intend, soon
from micsctl.aws.errors import explained
from micsctl.aws.session import Aws
from micsctl.aws.tags import cluster_tags, filters, specification


@dataclass(frozen=True)
class Address:
    allocation_id: str
    public_ip: str
    interface_id: str | None  # the network interface that it leads to
    instance_id: str | None


def list_addresses(aws: Aws, cluster: str) -> list[Address]:
    with explained("list the Elastic IPs"):
        raw = aws.ec2.describe_addresses(Filters=filters(cluster))["Addresses"]
    return [_address(one) for one in raw]


def ensure_address(aws: Aws, cluster: str, intend: Intend) -> Address:
    """The cluster's Elastic IP. Raises PermissionDenied where the account has no more (5 per region by default)."""
    if found := list_addresses(aws, cluster):
        return found[0]
    with explained("allocate an Elastic IP"):
        intend("AllocateAddress")
        raw = aws.ec2.allocate_address(
            Domain="vpc", TagSpecifications=specification("elastic-ip", cluster_tags(cluster))
        )
    return _address(raw)


def associate(aws: Aws, address: Address, interface_id: str) -> None:
    """Let the address lead to this network interface; done already is no error."""
    if address.interface_id == interface_id:
        return
    with explained("give the head node its Elastic IP"):
        soon(
            lambda: aws.ec2.associate_address(
                AllocationId=address.allocation_id, NetworkInterfaceId=interface_id, AllowReassociation=True
            ),
            every_seconds=aws.settings.poll_seconds,
        )


def _address(raw: Mapping[str, Any]) -> Address:
    return Address(
        allocation_id=raw["AllocationId"],
        public_ip=raw["PublicIp"],
        interface_id=raw.get("NetworkInterfaceId") or None,
        instance_id=raw.get("InstanceId") or None,
    )
