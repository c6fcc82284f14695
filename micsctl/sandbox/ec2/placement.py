"""Placement groups, which moto lacks, and where in the network instances stand."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from micsctl.sandbox.ec2.models import SandboxInstance
from micsctl.sandbox.ec2.moto_parts import ActionResult, EC2ClientError, EmptyResult
from micsctl.sandbox.ec2.naming import hex_id
from micsctl.sandbox.ec2.request import Request, fits

_NODES_PER_SWITCH = 2  # instances under one bottom-layer network node
_TOPOLOGY_FAMILIES = ("p3dn.", "p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6-", "trn1.", "trn1n.", "trn2.")


class PlacementActions(Request):
    def create_placement_group(self) -> Any:
        self.error_on_dryrun()
        name, strategy = str(self._get_param("GroupName")), str(self._get_param("Strategy", "cluster"))
        if name in self.backend.placement_groups:
            message = f"The placement group '{name}' already exists."
            raise EC2ClientError("InvalidPlacementGroup.Duplicate", message)
        if strategy not in ("cluster", "spread", "partition"):
            raise EC2ClientError("InvalidParameterValue", f"Value ({strategy}) for parameter strategy is invalid.")
        group_id = f"pg-{hex_id(self.region, name, time.time_ns())}"
        self.backend.create_tags([group_id], self._parse_tag_specification().get("placement-group", {}))
        self.backend.placement_groups[name] = {
            "GroupName": name,
            "Strategy": strategy,
            "State": "available",
            "GroupId": group_id,
            "GroupArn": f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}",
        }
        return ActionResult({"PlacementGroup": self._placement_group(name)})

    def describe_placement_groups(self) -> Any:
        wanted_names, wanted_ids = self._get_param("GroupNames", []), self._get_param("GroupIds", [])
        for name in wanted_names:
            self._check_placement_group(name)
        groups = [self._placement_group(name) for name in self.backend.placement_groups]
        keys = {"group-name": "GroupName", "group-arn": "GroupArn", "state": "State", "strategy": "Strategy"}
        found = [
            group
            for group in groups
            if (not wanted_names or group["GroupName"] in wanted_names)
            and (not wanted_ids or group["GroupId"] in wanted_ids)
            and fits(self._filters_from_querystring(), {name: group[key] for name, key in keys.items()}, group["Tags"])
        ]
        return ActionResult({"PlacementGroups": found})

    def delete_placement_group(self) -> Any:
        self.error_on_dryrun()
        name = str(self._get_param("GroupName"))
        self._check_placement_group(name)
        members = [i for i in self.backend.all_instances() if i.placement.group_name == name]
        if any(instance.state != "terminated" for instance in members):
            message = f"The placement group '{name}' is in use and may not be deleted."
            raise EC2ClientError("InvalidPlacementGroup.InUse", message)
        del self.backend.placement_groups[name]
        return EmptyResult()

    def _placement_group(self, name: str) -> dict[str, Any]:
        group = self.backend.placement_groups[name]
        tags = self.backend.tags[group["GroupId"]]
        return {**group, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}

    def describe_instance_topology(self) -> Any:
        """Three layers of network nodes, coarsest first; neighbours in the launch stand under different switches."""
        ids, groups = self._get_param("InstanceIds", []), self._get_param("GroupNames", [])
        size = self._get_param("MaxResults")
        if ids and size:
            message = "The parameter InstanceIds cannot be used with the parameter MaxResults"
            raise EC2ClientError("InvalidParameterCombination", message)
        self.backend.get_multi_instances_by_id(ids)  # refuses unknown ones
        for name in groups:
            self._check_placement_group(name)
        found = [
            row
            for reservation in self.backend.all_reservations()
            for row in _topology(reservation.instances, self.backend.describe_availability_zones())
            if (not ids or row["InstanceId"] in ids)
            and (not groups or row.get("GroupName") in groups)
            and fits(
                self._filters_from_querystring(),
                {
                    "availability-zone": row["AvailabilityZone"],
                    "instance-type": row["InstanceType"],
                    "zone-id": row["ZoneId"],
                },
                [],
            )
        ]
        start = int(self._get_param("NextToken") or 0)
        end = start + (int(size or 20) if not ids else len(found))
        more = {"NextToken": str(end)} if end < len(found) else {}
        return ActionResult({"Instances": found[start:end], **more})


def _topology(launched: Sequence[SandboxInstance], zones: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Rows of DescribeInstanceTopology for one reservation."""
    switches = max(1, math.ceil(len(launched) / _NODES_PER_SWITCH))
    for instance in launched:
        if instance.state != "running" or not instance.instance_type.startswith(_TOPOLOGY_FAMILIES):
            continue
        zone = instance.availability_zone
        spine = ("spine", zone)
        aggregate = (*spine, instance.placement.group_name or instance.id)
        leaf = (*aggregate, instance.ami_launch_index % switches)
        row = {
            "InstanceId": instance.id,
            "InstanceType": instance.instance_type,
            "NetworkNodes": [f"nn-{hex_id(*layer)}" for layer in (spine, aggregate, leaf)],
            "AvailabilityZone": zone,
            "ZoneId": next((one.zone_id for one in zones if one.name == zone), ""),
        }
        yield row | ({"GroupName": instance.placement.group_name} if instance.placement.group_name else {})
