"""RunInstances."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from micsctl.sandbox.ec2.models import SandboxInstance
from micsctl.sandbox.ec2.moto_parts import ActionResult, EC2ClientError
from micsctl.sandbox.ec2.request import EC2Fault, Request, fault_message
from micsctl.sandbox.hosts import HostRequest

_MAX_USER_DATA_BYTES = 16384


@dataclass(frozen=True)
class Launch:
    """A checked RunInstances request."""

    instance_type: str
    zone: str
    count: int
    group_name: str
    interfaces: tuple[Mapping[str, Any], ...]  # as asked for, ordered by card and device


class LaunchActions(Request):
    def run_instances(self) -> Any:
        token = self._get_param("ClientToken")
        request = {name: value for name, value in self.querystring.items() if name != "ClientToken"}
        digest = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()
        if token and token in self.backend.launches:
            first_digest, reservation = self.backend.launches[token]
            if digest != first_digest:
                message = (
                    "Arguments on this idempotent request are inconsistent with arguments used in previous request(s)."
                )
                raise EC2ClientError("IdempotentParameterMismatch", message)
            return ActionResult(reservation)
        launch = self._check_launch()
        self.error_on_dryrun()
        if fault := self.emulator.faults.hit("RunInstances", launch.zone):
            message = fault_message(fault.code, "RunInstances", launch.instance_type, launch.zone)
            raise EC2Fault(fault.code, message, fault.http_status)
        return self._launch(launch, token, digest)

    def _check_launch(self) -> Launch:
        """Everything that AWS refuses and moto does not."""
        interfaces = self._get_param("NetworkInterfaces", [])
        # moto takes the first for the primary one
        interfaces.sort(key=lambda one: (int(one.get("NetworkCardIndex") or 0), int(one.get("DeviceIndex") or 0)))
        minimum, maximum = int(self._get_param("MinCount")), int(self._get_param("MaxCount"))
        if not 1 <= minimum <= maximum:
            message = f"Invalid value '{maximum}' for maxCount. Must be at least 1 and not below minCount ({minimum})."
            raise EC2ClientError("InvalidParameterValue", message)
        subnets = [one["SubnetId"] for one in interfaces if one.get("SubnetId")] or [self._get_param("SubnetId")]
        group_name = str(self._get_param("Placement.GroupName", ""))
        if group_name:
            self._check_placement_group(group_name)
        if len(interfaces) > 1 and any(one.get("AssociatePublicIpAddress") for one in interfaces):
            raise EC2ClientError(
                "InvalidParameterCombination",
                "The associatePublicIPAddress parameter cannot be specified when launching with multiple network"
                " interfaces.",
            )
        if len(base64.b64decode(str(self._get_param("UserData") or ""))) > _MAX_USER_DATA_BYTES:
            raise EC2ClientError("InvalidParameterValue", f"User data is limited to {_MAX_USER_DATA_BYTES} bytes")
        self._check_instance_profile()
        subnet = self.backend.get_subnet(subnets[0]) if subnets[0] else None
        groups = {*self._get_param("SecurityGroupIds", []), *(g for one in interfaces for g in one.get("Groups") or [])}
        for group_id in sorted(groups):
            self._check_group(group_id, subnet)
        zone = subnet.availability_zone if subnet else self._get_param("Placement.AvailabilityZone", f"{self.region}a")
        launch = Launch(
            str(self._get_param("InstanceType", "m1.small")),
            str(zone),
            maximum,
            group_name,
            tuple(map(dict, interfaces)),
        )
        self._check_offered(launch)
        self._check_cards(launch)
        if subnet:
            self._check_room(launch, subnet)
        return launch

    def _check_instance_profile(self) -> None:
        known = self.emulator.instance_profiles(self.backend.account_id)
        for field in ("name", "arn"):
            asked = self._get_param(f"IamInstanceProfile.{field.title()}")
            if asked and asked not in [getattr(profile, field) for profile in known]:
                message = f"Value ({asked}) for parameter iamInstanceProfile.{field} is invalid."
                raise EC2ClientError("InvalidParameterValue", f"{message} Invalid IAM Instance Profile {field}")

    def _check_group(self, group_id: str, subnet: Any) -> None:
        group = self.backend.get_security_group_from_id(group_id)
        if group is None:
            raise EC2ClientError("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
        if subnet and group.vpc_id != subnet.vpc_id:
            message = f"Security group {group_id} and subnet {subnet.id} belong to different networks."
            raise EC2ClientError("InvalidParameter", message)

    def _check_offered(self, launch: Launch) -> None:
        offers = self.backend.describe_instance_type_offerings(
            "availability-zone", {"instance-type": [launch.instance_type]}
        )
        zones = sorted(offer["Location"] for offer in offers)
        if zones and launch.zone not in zones:
            raise EC2ClientError(
                "Unsupported",
                f"Your requested instance type ({launch.instance_type}) is not supported in your requested Availability"
                f" Zone ({launch.zone}). Please retry your request by not specifying an Availability Zone or choosing"
                f" {', '.join(zones)}.",
            )

    def _check_cards(self, launch: Launch) -> None:
        network = self._network_info(launch.instance_type)
        cards = len(network.get("NetworkCards", [])) or 1
        most_efa = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0))
        places = [(int(o.get("NetworkCardIndex") or 0), int(o.get("DeviceIndex") or 0)) for o in launch.interfaces]
        if wrong := [card for card, _ in places if card >= cards]:
            message = f"Network card index {wrong[0]} exceeds the limit for {launch.instance_type}."
            raise EC2ClientError("InvalidParameterValue", message)
        if len(set(places)) < len(places):
            message = "Each network interface requires a unique device index on its network card."
            raise EC2ClientError("InvalidParameterValue", message)
        efa = [one for one in launch.interfaces if str(one.get("InterfaceType", "")).startswith("efa")]
        if len(efa) > most_efa:
            message = (
                f"EFA interface count {len(efa)} exceeds the allowed limit ({most_efa}) for {launch.instance_type}."
            )
            raise EC2ClientError("AttachmentLimitExceeded", message)
        if places and places[0] != (0, 0):
            raise EC2ClientError("InvalidParameterCombination", "There is no network interface with device index 0.")
        if launch.interfaces and launch.interfaces[0].get("InterfaceType") == "efa-only":
            message = "The primary network interface cannot be an EFA-only network interface."
            raise EC2ClientError("InvalidParameterCombination", message)

    def _network_info(self, instance_type: str) -> Mapping[str, Any]:
        found = self.backend.describe_instance_types([instance_type])
        return cast(Mapping[str, Any], found[0]["NetworkInfo"]) if found else {}

    def _check_room(self, launch: Launch, subnet: Any) -> None:
        needed = launch.count * max(1, sum(1 for one in launch.interfaces if one.get("InterfaceType") != "efa-only"))
        # AWS keeps the first four addresses and the last
        room = (
            ipaddress.ip_network(subnet.cidr_block).num_addresses
            - 5
            - len(self.backend.interfaces(subnet_id=subnet.id))
        )
        if needed > room:
            raise EC2ClientError(
                "InsufficientFreeAddressesInSubnet",
                f"There are not enough free addresses in subnet '{subnet.id}' to satisfy the requested number of"
                " instances.",
            )

    def _launch(self, launch: Launch, token: str | None, digest: str) -> Any:
        # moto keys interfaces by their device index, which may occur once on every card
        for index, one in enumerate(self._get_param("NetworkInterfaces", [])):
            one["DeviceIndex"] = index
        self.params["MinCount"] = launch.count  # moto starts MinCount instances
        result = super().run_instances()
        reservation = result.result
        tags = self._parse_tag_specification().get("network-interface", {})
        hidden_until = time.monotonic() + self.emulator.faults.hidden_seconds()
        for instance in reservation.instances:
            instance.placement.group_name = launch.group_name
            instance.visible_at = hidden_until
            self._associate_profile(instance)
            self._finish_interfaces(instance, launch, tags)
        if token:
            self.backend.launches[token] = (digest, reservation)
        self._start_hosts(reservation.instances)
        return ActionResult(reservation)

    def _associate_profile(self, instance: SandboxInstance) -> None:
        """moto does so for the first instance of a launch only."""
        name, arn = (self._get_param(f"IamInstanceProfile.{field}") for field in ("Name", "Arn"))
        if (name or arn) and instance.id not in self.backend.iam_instance_profile_associations:
            self.backend.associate_iam_instance_profile(instance.id, name, arn)

    def _start_hosts(self, instances: Sequence[SandboxInstance]) -> None:
        """Where this machine cannot start them (a full disk), the instances end, as AWS ends what it cannot start."""
        requests = [self._host_request(instance) for instance in instances]
        try:
            self.emulator.hosts.start(requests, self.emulator.running, self.emulator.ended)
        except Exception:  # noqa: BLE001  (whatever it is: instances without hosts would be pending for ever)
            traceback.print_exc()
            self.emulator.hosts.stop([request.instance_id for request in requests])
            for instance in instances:
                instance.fail()

    def _finish_interfaces(self, instance: SandboxInstance, launch: Launch, tags: Mapping[str, str]) -> None:
        """What moto drops: card, kind, tags, distinct addresses. EFA-only interfaces have no address."""
        for index, interface in instance.nics.items():
            asked = launch.interfaces[index] if launch.interfaces else {}
            interface.sandbox_card = int(asked.get("NetworkCardIndex") or 0)
            interface.device_index = int(asked.get("DeviceIndex") or 0)
            interface.interface_type = str(asked.get("InterfaceType") or "interface")
            if index == 0 and asked.get("DeleteOnTermination") is None:
                interface.delete_on_termination = True
            if len(launch.interfaces) > 1:
                interface.public_ip_auto_assign, interface.public_ip = False, None
            interface.add_tags(dict(tags))
            self._give_address(instance, interface, asked)

    def _give_address(self, instance: SandboxInstance, interface: Any, asked: Mapping[str, Any]) -> None:
        mine = interface.private_ip_address
        interface.private_ip_address, interface.private_ip_addresses = None, []
        if interface.interface_type == "efa-only":
            return
        # the hosts of all VPCs share one network, so an address is given out once
        used = self.emulator.private_addresses_in_use()
        primary = interface.device_index == 0 and interface.sandbox_card == 0
        reserved = primary or asked.get("PrivateIpAddress")  # moto draws the others at random, without a look
        while mine in used or not reserved:
            mine, reserved = interface.subnet.get_available_subnet_ip(instance), True
        interface.private_ip_address = mine
        interface.private_ip_addresses = [{"Primary": True, "PrivateIpAddress": mine}]

    def _host_request(self, instance: SandboxInstance) -> HostRequest:
        key = self.backend.key_pairs.get(instance.key_name)
        return HostRequest(
            instance_id=instance.id,
            private_ip=str(instance.private_ip_address),
            hostname=instance.private_dns_name.split(".")[0],
            public_key=key.public_key if key else "",
            user_data=base64.b64decode(str(self._get_param("UserData") or "")),
            subnet_cidr=instance.nics[0].subnet.cidr_block,
            region=self.backend.region_name,
        )
