"""Deleting one resource: gone already is success, still in use is "not yet"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from micsctl.aws.create import is_not_found
from micsctl.aws.errors import code_of, explain, explained
from micsctl.aws.inventory import Resource
from micsctl.aws.session import Aws


def try_remove(aws: Aws, resource: Resource) -> bool:
    """True when it is gone or going, False while something else still holds it. Raises MicsctlError.

    Instances are not removed here (see `instances.terminate`).
    """
    try:
        _REMOVERS[resource.kind](aws.ec2, resource.id)
    except ClientError as error:
        if code_of(error) == "DependencyViolation" or code_of(error).endswith("InUse"):
            return False
        if not is_not_found(error) and code_of(error) != "Gateway.NotAttached":
            raise explain(error, f"delete the {resource.kind} {resource.id}") from error
    return True


def _release_address(ec2: Any, allocation_id: str) -> None:
    for address in ec2.describe_addresses(AllocationIds=[allocation_id])["Addresses"]:
        if association := address.get("AssociationId"):
            ec2.disassociate_address(AssociationId=association)
    ec2.release_address(AllocationId=allocation_id)


def _delete_gateway(ec2: Any, gateway_id: str) -> None:
    for gateway in ec2.describe_internet_gateways(InternetGatewayIds=[gateway_id])["InternetGateways"]:
        for attachment in gateway.get("Attachments", ()):
            ec2.detach_internet_gateway(InternetGatewayId=gateway_id, VpcId=attachment["VpcId"])
    ec2.delete_internet_gateway(InternetGatewayId=gateway_id)


# in the order in which they can go
_REMOVERS: dict[str, Callable[[Any, str], object]] = {
    "Elastic IP": _release_address,
    "network interface": lambda ec2, id: ec2.delete_network_interface(NetworkInterfaceId=id),
    "volume": lambda ec2, id: ec2.delete_volume(VolumeId=id),
    "placement group": lambda ec2, id: ec2.delete_placement_group(GroupName=id),
    "security group": lambda ec2, id: ec2.delete_security_group(GroupId=id),
    "key pair": lambda ec2, id: ec2.delete_key_pair(KeyName=id),
    "subnet": lambda ec2, id: ec2.delete_subnet(SubnetId=id),
    "internet gateway": _delete_gateway,
    "VPC": lambda ec2, id: ec2.delete_vpc(VpcId=id),
}
REMOVAL_ORDER = tuple(_REMOVERS)


def holders(aws: Aws, security_group_id: str) -> list[str]:
    """What still uses a security group: "eni-1 (EFS mount target, of amazon-elb)" for each network interface."""
    with explained(f"ask what uses {security_group_id}"):
        found = aws.ec2.describe_network_interfaces(Filters=[{"Name": "group-id", "Values": [security_group_id]}])
    return [
        f"{raw['NetworkInterfaceId']} ({raw.get('Description') or 'no description'}, of {_owner(raw)})"
        for raw in found["NetworkInterfaces"]
    ]


def _owner(interface: dict[str, Any]) -> str:
    instance = interface.get("Attachment", {}).get("InstanceId")
    return str(instance or interface.get("RequesterId") or interface.get("OwnerId") or "an unknown owner")
