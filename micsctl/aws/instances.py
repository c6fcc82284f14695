"""Instances: the parameters of RunInstances, and what AWS says about those that exist."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from micsctl.aws.create import is_not_found, soon
from micsctl.aws.errors import (
    AWS_ERRORS,
    CAPACITY_CODES,
    THROTTLING_CODES,
    AwsError,
    code_of,
    explain,
    explained,
    outcome_unknown,
)
from micsctl.aws.images import Image
from micsctl.aws.session import Aws
from micsctl.aws.tags import INDEX, Tags, as_dict, as_list, cluster_tags, filters
from micsctl.aws.types import InstanceType

_LAUNCH_TRIES = 4
_TERMINATE_AT_ONCE = 500
# a reason to try the next zone, besides a lack of capacity
_ZONE_CODES = frozenset({"InsufficientFreeAddressesInSubnet", "InvalidAvailabilityZone"})


@dataclass(frozen=True)
class Launch:
    """One attempt: all nodes in one zone, or none."""

    nodes: int
    type: InstanceType
    image: Image
    volume_gb: int
    subnet_id: str
    security_group_id: str
    key_name: str
    placement_group: str | None
    user_data: str
    tags: Tags
    instance_profile: str | None = None


def run_instances_parameters(launch: Launch, token: str) -> dict[str, Any]:
    """The arguments of RunInstances, without the credentials' part. Pure.

    MinCount = MaxCount makes it all or nothing; `token` makes a repeated call answer with the same instances.
    AssociatePublicIpAddress stays away: AWS refuses it with several interfaces.
    """
    volume = {
        "VolumeSize": max(launch.volume_gb, launch.image.root_gb),
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    parameters: dict[str, Any] = {
        "ClientToken": token,
        "MinCount": launch.nodes,
        "MaxCount": launch.nodes,
        "ImageId": launch.image.id,
        "InstanceType": launch.type.name,
        "KeyName": launch.key_name,
        "UserData": launch.user_data,
        "NetworkInterfaces": network_interfaces(launch.type, launch.subnet_id, launch.security_group_id),
        "BlockDeviceMappings": [{"DeviceName": launch.image.root_device, "Ebs": volume}],
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required"},
        # the node ends itself with `shutdown` when its time is up
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": as_list(launch.tags)} for kind in ("instance", "volume", "network-interface")
        ],
    }
    if launch.placement_group:
        parameters["Placement"] = {"GroupName": launch.placement_group}
    if launch.instance_profile:
        parameters["IamInstanceProfile"] = {"Name": launch.instance_profile}
    return parameters


def network_interfaces(type: InstanceType, subnet_id: str, security_group_id: str) -> list[dict[str, Any]]:
    """One EFA interface for every card that takes one, and a plain interface for IP at card 0, device 0.

    This is AWS's advice for types with several cards: card 0 gets its EFA as device 1, every further card as device 0.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    places = [(0, 0, "interface")]
    places += [(card, 1 if card == 0 else 0, "efa-only") for card in type.efa_cards]
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": device,
            "InterfaceType": kind,
            "SubnetId": subnet_id,
            "Groups": [security_group_id],
            "DeleteOnTermination": True,
        }
        for card, device, kind in places
    ]


class LaunchRefused(Exception):
    """AWS refused a launch. `code` is AWS's; `zone_only` says whether another zone may do; nothing was started."""

    def __init__(self, error: AwsError, zone: str) -> None:
        super().__init__(str(error))
        self.error, self.code = error, code_of(error) or type(error).__name__
        self.zone_only = self.code in CAPACITY_CODES | _ZONE_CODES
        self.unknown = outcome_unknown(error)
        self.explained = explain(error, f"start the machines in {zone}")


def run_instances(aws: Aws, parameters: Mapping[str, Any], zone: str) -> list[str]:
    """Start the machines; their ids in launch order.

    Repeats with the same ClientToken when AWS slows us down or its answer got lost. Raises LaunchRefused.
    """
    for attempt in range(_LAUNCH_TRIES):
        try:
            answer = aws.launcher.run_instances(**parameters)
            break
        except AWS_ERRORS as error:
            worth_repeating = code_of(error) in THROTTLING_CODES or outcome_unknown(error)
            if not worth_repeating or attempt == _LAUNCH_TRIES - 1:
                raise LaunchRefused(error, zone) from error
        time.sleep(min(2.0, aws.settings.poll_seconds) * 2**attempt * random.uniform(0.5, 1.5))
    launched = sorted(answer["Instances"], key=lambda raw: int(raw["AmiLaunchIndex"]))
    return [raw["InstanceId"] for raw in launched]


@dataclass(frozen=True)
class Instance:
    """What AWS says about one instance."""

    id: str
    index: int  # its tag, else its place in the launch
    indexed: bool  # has the tag
    state: str  # pending, running, shutting-down, terminated, stopping, stopped
    reason: str  # AWS's code and words for the last change of state; "" while all is well
    type: str
    zone: str
    private_ip: str  # "" once it has ended
    interface_id: str  # of card 0, device 0
    launched_at: datetime
    tags: Mapping[str, str]

    @property
    def alive(self) -> bool:
        """Exists and costs money (a stopped one: its volume)."""
        return self.state not in ("shutting-down", "terminated")

    @property
    def name(self) -> str:
        return f"node {self.index} ({self.id})"


def parse_instance(raw: Mapping[str, Any]) -> Instance:
    """From one element of a reservation of DescribeInstances."""
    tags = as_dict(raw.get("Tags"))
    primary = min(raw.get("NetworkInterfaces") or [{}], key=_place)
    reason = raw.get("StateReason") or {}
    return Instance(
        id=raw["InstanceId"],
        index=int(tags.get(INDEX, raw.get("AmiLaunchIndex", 0))),
        indexed=INDEX in tags,
        state=raw["State"]["Name"],
        reason=": ".join(text for text in (reason.get("Code"), reason.get("Message")) if text),
        type=raw["InstanceType"],
        zone=raw.get("Placement", {}).get("AvailabilityZone", ""),
        private_ip=primary.get("PrivateIpAddress") or raw.get("PrivateIpAddress") or "",
        interface_id=primary.get("NetworkInterfaceId", ""),
        launched_at=raw["LaunchTime"],
        tags=tags,
    )


def _place(interface: Mapping[str, Any]) -> tuple[int, int]:
    attachment = interface.get("Attachment", {})
    return int(attachment.get("NetworkCardIndex", 0)), int(attachment.get("DeviceIndex", 0))


def list_instances(aws: Aws, cluster: str) -> list[Instance]:
    """All instances of the cluster that AWS still shows, ended ones too, by index. One describe for all."""
    with explained("list the instances"):
        return _describe(aws, Filters=filters(cluster))


def find_instances(aws: Aws, ids: Iterable[str]) -> list[Instance]:
    """Those of the ids that AWS knows; an unknown id is left out."""
    found = []
    for id in ids:  # one by one: a single unknown id makes the whole call fail
        try:
            found += _describe(aws, InstanceIds=[id])
        except ClientError as error:
            if not is_not_found(error):
                raise explain(error, f"look up {id}") from error
    return found


def _describe(aws: Aws, **query: Any) -> list[Instance]:
    pages = aws.ec2.get_paginator("describe_instances").paginate(**query)
    raws = [raw for page in pages for reservation in page["Reservations"] for raw in reservation["Instances"]]
    return sorted((parse_instance(raw) for raw in raws), key=lambda instance: (instance.index, instance.id))


def tag_index(aws: Aws, cluster: str, instance: Instance) -> None:
    """Fix the node's place for the cluster's life."""
    tags = {INDEX: str(instance.index)} | cluster_tags(cluster, f"micsctl-{cluster}-{instance.index}")
    with explained(f"tag {instance.id}"):
        soon(
            lambda: aws.ec2.create_tags(Resources=[instance.id], Tags=as_list(tags)),
            every_seconds=aws.settings.poll_seconds,
        )


def terminate(aws: Aws, ids: Iterable[str]) -> None:
    """Ask AWS to end them. Not found is success."""
    pending = list(ids)
    with explained("end the instances"):
        for start in range(0, len(pending), _TERMINATE_AT_ONCE):
            _terminate(aws, pending[start : start + _TERMINATE_AT_ONCE])


def _terminate(aws: Aws, ids: Sequence[str]) -> None:
    try:
        aws.ec2.terminate_instances(InstanceIds=list(ids))
    except ClientError as error:
        if not is_not_found(error):
            raise
        if len(ids) > 1:
            for id in ids:
                _terminate(aws, [id])


def console_output(aws: Aws, instance_id: str, *, latest: bool) -> str:
    """What the instance has written to its console so far, "" while AWS has nothing.

    `latest` reads it while the instance runs, which AWS offers on Nitro types only.
    """
    more = {"Latest": True} if latest else {}
    with explained(f"read the console of {instance_id}"):
        answer = soon(
            lambda: aws.ec2.get_console_output(InstanceId=instance_id, **more),
            every_seconds=aws.settings.poll_seconds,
        )
    return str(answer.get("Output") or "")
