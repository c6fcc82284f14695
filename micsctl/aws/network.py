"""The cluster's own VPC and its security group; or the subnet that the user gave."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from micsctl.aws.create import Intend, soon
from micsctl.aws.errors import code_of, explain, explained
from micsctl.aws.session import Aws
from micsctl.aws.tags import cluster_tags, filters, specification
from micsctl.errors import MicsctlError, UsageError

_SUBNET_PREFIX = 20  # 16 subnets of 4091 addresses in a /16
_ANYWHERE = "0.0.0.0/0"


@dataclass(frozen=True)
class Subnet:
    id: str
    vpc_id: str
    zone: str


def find_subnet(aws: Aws, subnet_id: str) -> Subnet:
    """A subnet that the user gave.

    Raises UsageError where it does not exist, or no Elastic IP can lead into its VPC.
    """
    try:
        raw = aws.ec2.describe_subnets(SubnetIds=[subnet_id])["Subnets"][0]
    except ClientError as error:
        if code_of(error).startswith("InvalidSubnetID"):
            raise UsageError(
                f"there is no subnet {subnet_id} in {aws.settings.region}", next="set cluster.subnet in mics.yaml"
            ) from error
        raise explain(error, f"look up the subnet {subnet_id}") from error
    subnet = _subnet(raw)
    attached = [{"Name": "attachment.vpc-id", "Values": [subnet.vpc_id]}]
    with explained(f"look for the internet gateway of {subnet.vpc_id}"):
        if not aws.ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]:
            raise UsageError(
                f"the subnet {subnet_id} cannot be reached from here",
                f"its VPC {subnet.vpc_id} has no internet gateway, so the head node's Elastic IP would lead nowhere",
                next="attach one and route 0.0.0.0/0 to it, or drop cluster.subnet from mics.yaml",
            )
    return subnet


def ensure_vpc(aws: Aws, cluster: str, intend: Intend) -> str:
    """Id of the cluster's VPC: DNS names, an internet gateway, and a default route to it in the main route table."""
    with explained("make the VPC"):
        found = aws.ec2.describe_vpcs(Filters=filters(cluster))["Vpcs"]
        vpc_id = str(found[0]["VpcId"]) if found else _create_vpc(aws, cluster, intend)
        for attribute in ("EnableDnsSupport", "EnableDnsHostnames"):  # the API takes one at a time
            switch = partial(aws.ec2.modify_vpc_attribute, VpcId=vpc_id, **{attribute: {"Value": True}})
            soon(switch, every_seconds=aws.settings.poll_seconds)
    with explained("connect the VPC to the internet"):
        _ensure_default_route(aws, vpc_id, _ensure_gateway(aws, cluster, vpc_id, intend))
    return vpc_id


def _create_vpc(aws: Aws, cluster: str, intend: Intend) -> str:
    intend("CreateVpc")
    answer = aws.ec2.create_vpc(
        CidrBlock=aws.settings.vpc_cidr, TagSpecifications=specification("vpc", cluster_tags(cluster))
    )
    return str(answer["Vpc"]["VpcId"])


def _ensure_gateway(aws: Aws, cluster: str, vpc_id: str, intend: Intend) -> str:
    found = aws.ec2.describe_internet_gateways(Filters=filters(cluster))["InternetGateways"]
    if found:
        gateway = found[0]
    else:
        intend("CreateInternetGateway")
        gateway = aws.ec2.create_internet_gateway(
            TagSpecifications=specification("internet-gateway", cluster_tags(cluster))
        )["InternetGateway"]
    gateway_id = str(gateway["InternetGatewayId"])
    if all(attachment.get("VpcId") != vpc_id for attachment in gateway.get("Attachments", ())):
        soon(
            lambda: aws.ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id),
            every_seconds=aws.settings.poll_seconds,
        )
    return gateway_id


def _ensure_default_route(aws: Aws, vpc_id: str, gateway_id: str) -> None:
    wanted = [{"Name": "vpc-id", "Values": [vpc_id]}, {"Name": "association.main", "Values": ["true"]}]
    table = aws.ec2.describe_route_tables(Filters=wanted)["RouteTables"][0]
    if all(route.get("DestinationCidrBlock") != _ANYWHERE for route in table["Routes"]):
        aws.ec2.create_route(RouteTableId=table["RouteTableId"], DestinationCidrBlock=_ANYWHERE, GatewayId=gateway_id)


def ensure_subnet(aws: Aws, cluster: str, vpc_id: str, zone: str, intend: Intend) -> Subnet:
    """The VPC's subnet in this zone."""
    with explained(f"make a subnet in {zone}"):
        found = aws.ec2.describe_subnets(Filters=filters(cluster, vpc_id=vpc_id, availability_zone=zone))["Subnets"]
        if found:
            return _subnet(found[0])
        everywhere = aws.ec2.describe_subnets(Filters=[{"Name": "tag-key", "Values": ["micsctl:cluster"]}])["Subnets"]
        block = free_block(
            aws.settings.vpc_cidr,
            taken=(raw["CidrBlock"] for raw in everywhere if raw["VpcId"] == vpc_id),
            avoid=(raw["CidrBlock"] for raw in everywhere),
        )
        intend("CreateSubnet", zone=zone, cidr=block)
        answer = soon(
            lambda: aws.ec2.create_subnet(
                VpcId=vpc_id,
                AvailabilityZone=zone,
                CidrBlock=block,
                TagSpecifications=specification("subnet", cluster_tags(cluster, f"micsctl-{cluster}-{zone}")),
            ),
            every_seconds=aws.settings.poll_seconds,
        )
    return _subnet(answer["Subnet"])


def free_block(vpc_cidr: str, taken: Iterable[str], avoid: Iterable[str]) -> str:
    """The first block for a subnet that overlaps nothing `taken`, and if possible nothing to `avoid`.

    Other clusters' blocks are avoided so that addresses differ between clusters (the VPCs can be peered).
    Raises MicsctlError where the VPC is full.
    """
    taken_networks = [ipaddress.ip_network(block) for block in taken]
    avoided_networks = [ipaddress.ip_network(block) for block in avoid]
    free = [
        block
        for block in ipaddress.ip_network(vpc_cidr).subnets(new_prefix=_SUBNET_PREFIX)
        if not any(block.overlaps(network) for network in taken_networks)
    ]
    if not free:
        raise MicsctlError("could not make a subnet", f"no free block is left in {vpc_cidr}", next="micsctl down")
    good = (block for block in free if not any(block.overlaps(network) for network in avoided_networks))
    return str(next(good, free[0]))


def ensure_security_group(aws: Aws, cluster: str, vpc_id: str, caller_cidr: str, intend: Intend) -> str:
    """Id of the cluster's group: all traffic in and out to itself, SSH in from `caller_cidr` only, all out.

    EFA needs the rule to the group itself for egress too; "all out" is not enough for its traffic.
    """
    with explained("make the security group"):
        found = aws.ec2.describe_security_groups(Filters=filters(cluster, vpc_id=vpc_id))["SecurityGroups"]
        if found:
            group_id = str(found[0]["GroupId"])
        else:
            intend("CreateSecurityGroup")
            group_id = str(
                aws.ec2.create_security_group(
                    GroupName=f"micsctl-{cluster}",
                    Description=f"micsctl cluster {cluster}",
                    VpcId=vpc_id,
                    TagSpecifications=specification("security-group", cluster_tags(cluster)),
                )["GroupId"]
            )
        group = soon(
            lambda: aws.ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"][0],
            every_seconds=aws.settings.poll_seconds,
        )
        _ensure_rules(aws, group, caller_cidr)
    return group_id


def _ensure_rules(aws: Aws, group: dict[str, Any], caller_cidr: str) -> None:
    group_id, port = group["GroupId"], aws.settings.ssh_port
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    if not _has_rule_to_itself(group["IpPermissions"], group_id):
        aws.ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[itself])
    if not _has_rule_to_itself(group["IpPermissionsEgress"], group_id):
        aws.ec2.authorize_security_group_egress(GroupId=group_id, IpPermissions=[itself])
    allowed = {
        block["CidrIp"]
        for rule in group["IpPermissions"]
        if rule.get("FromPort") == port
        for block in rule.get("IpRanges", ())
    }
    if stale := sorted(allowed - {caller_cidr}):
        aws.ec2.revoke_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh_rule(port, stale)])
    if caller_cidr not in allowed:
        aws.ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[_ssh_rule(port, [caller_cidr])])


def _ssh_rule(port: int, blocks: list[str]) -> dict[str, Any]:
    return {
        "IpProtocol": "tcp",
        "FromPort": port,
        "ToPort": port,
        "IpRanges": [{"CidrIp": block} for block in blocks],
    }


def _has_rule_to_itself(permissions: Iterable[dict[str, Any]], group_id: str) -> bool:
    return any(
        rule["IpProtocol"] == "-1" and any(pair.get("GroupId") == group_id for pair in rule.get("UserIdGroupPairs", ()))
        for rule in permissions
    )


def _subnet(raw: dict[str, Any]) -> Subnet:
    return Subnet(id=raw["SubnetId"], vpc_id=raw["VpcId"], zone=raw["AvailabilityZone"])
