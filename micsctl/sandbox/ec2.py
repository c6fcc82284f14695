"""The emulated EC2: moto, with what moto lacks or loses. The only importer of moto.

moto has no plug-ins. Its response, backend, instance and attachment classes are subclassed and put in moto's places by
`install`, before the first request; `install` fails loudly where a place is not what it was. Which behaviour comes from
which public source stands in docs/sandbox.md.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

# read by moto when it is imported
os.environ.update(
    MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION="1",
    MOTO_ENABLE_KEYPAIR_VALIDATION="1",
    MOTO_ENABLE_AMI_VALIDATION="1",
    MOTO_EC2_LOAD_DEFAULT_AMIS="false",
)

from botocore.model import OperationNotFoundError

from micsctl.sandbox.faults import FaultBook
from micsctl.sandbox.hosts import HostRequest, NodeHosts
from micsctl.sandbox.imds import InstanceFacts


def _moto(module: str) -> Any:
    """moto annotates its models loosely and differently from release to release, so they are not type checked."""
    return import_module(f"moto.{module}")


ec2_models, instance_models = _moto("ec2.models"), _moto("ec2.models.instances")
eni_models, eip_models = _moto("ec2.models.elastic_network_interfaces"), _moto("ec2.models.elastic_ip_addresses")
ec2_urls, ec2_utils, ssm_models = _moto("ec2.urls"), _moto("ec2.utils"), _moto("ssm.models")
responses, werkzeug_app = _moto("core.responses"), _moto("moto_server.werkzeug_app")
EC2Backend, Ami = ec2_models.EC2Backend, _moto("ec2.models.amis").Ami
if TYPE_CHECKING:
    MotoInstance = Any
    MotoAttachment = Any
    MotoBackend = Any
    MotoResponse = Any
    MotoParameters = Any
else:
    MotoInstance, MotoAttachment = instance_models.Instance, eni_models.Attachment
    MotoBackend, MotoResponse = EC2Backend, _moto("ec2.responses").EC2Response
    MotoParameters = ssm_models.ParameterDict
ActionResult, EmptyResult, BaseResponse = responses.ActionResult, responses.EmptyResult, responses.BaseResponse
EC2ClientError = _moto("ec2.exceptions").EC2ClientError
DependencyViolationError = _moto("ec2.exceptions").DependencyViolationError
Base64EncodedString, utcnow = _moto("core.types").Base64EncodedString, _moto("core.utils").utcnow

IMAGES = ("base-oss-nvidia-driver-gpu-ubuntu-22.04", "base-oss-nvidia-driver-gpu-ubuntu-24.04")
_IMAGE_PARAMETER = "/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"
_PENDING, _RUNNING, _SHUTTING_DOWN, _TERMINATED, _STOPPED = (
    ("pending", 0),
    ("running", 16),
    ("shutting-down", 32),
    ("terminated", 48),
    ("stopped", 80),
)
_MAX_ADDRESSES = 5
_MAX_USER_DATA_BYTES = 16384
_CONSOLE_BYTES = 65536
_NODES_PER_SWITCH = 2  # instances under one bottom-layer network node
_TOPOLOGY_FAMILIES = ("p3dn.", "p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6-", "trn1.", "trn1n.", "trn2.")


class EC2Fault(Exception):
    """An error with an HTTP status of its own; moto answers every ServiceException with 400."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class Emulator:
    """What moto does not know: the hosts, the faults, and which public address leads where."""

    def __init__(self, hosts: NodeHosts, faults: FaultBook) -> None:
        self.hosts = hosts
        self.faults = faults
        self.lock = threading.RLock()  # moto is not made for threads: one request at a time
        self._routed = dict[str, str]()

    def backends(self) -> Iterator[SandboxBackend]:
        for _account, _region, backend in ec2_models.ec2_backends.iter_backends():
            yield backend

    def instances(self) -> Iterator[SandboxInstance]:
        for backend in self.backends():
            yield from backend.all_instances()

    def live_instances(self) -> int:
        with self.lock:
            return sum(1 for instance in self.instances() if instance.state != "terminated")

    def resources(self) -> tuple[str, ...]:
        """Everything that somebody made and nobody removed, as "us-east-1 i-0abc"."""
        with self.lock:
            return tuple(
                f"{backend.region_name} {name}" for backend in self.backends() for name in backend.made_by_users()
            )

    def public_addresses_in_use(self) -> set[str]:
        used = set[str]()
        for backend in self.backends():
            used |= {address.public_ip for address in backend.addresses}
            used |= {interface.public_ip for interface in backend.enis.values() if interface.public_ip}
        return used

    def free_public_address(self) -> str:
        used = self.public_addresses_in_use()
        pool = ipaddress.ip_network(self.hosts.public_cidr).hosts()
        found = next((str(address) for address in pool if str(address) not in used), None)
        if found is None:
            raise EC2ClientError("InsufficientAddressCapacity", "Not enough available addresses to satisfy the request")
        return found

    def private_addresses_in_use(self) -> set[str]:
        return {
            address["PrivateIpAddress"]
            for backend in self.backends()
            for interface in backend.enis.values()
            for address in interface.private_ip_addresses
        }

    def refresh_routes(self) -> None:
        """Let each public address lead to its instance where the route table and the security group allow it."""
        wanted = {
            interface.public_ip: interface.instance.id
            for backend in self.backends()
            for interface in backend.enis.values()
            if interface.public_ip
            and interface.instance
            and interface.instance.state in ("pending", "running")
            and backend.has_way_out(interface.subnet)
            and _lets_in(interface.group_set, self.hosts.caller_cidr, self.hosts.ssh_port)
        }
        for address in sorted(set(self._routed) | set(wanted)):
            if self._routed.get(address) != wanted.get(address):
                self.hosts.route(address, wanted.get(address))
        self._routed = wanted

    def running(self, instance_id: str) -> None:
        with self.lock:
            for instance in self.instances():
                if instance.id == instance_id and instance.state == "pending":
                    instance.enter(_RUNNING)
            self.refresh_routes()

    def ended(self, instance_id: str) -> None:
        with self.lock:
            for instance in self.instances():
                if instance.id == instance_id:
                    instance.host_ended()
            self.refresh_routes()

    def facts(self, private_ip: str = "", instance_id: str = "") -> InstanceFacts | None:
        """What the instance metadata service says to the instance with this address or id."""
        with self.lock:
            for instance in self.instances():
                if instance.state in ("pending", "running") and (
                    instance.private_ip_address == private_ip if private_ip else instance.id == instance_id
                ):
                    return _facts(instance, self.faults.spot_interruption())
        return None


class SandboxAttachment(MotoAttachment):  # type: ignore[misc]
    """moto says network card 0 for all."""

    def __init__(self, eni: Any) -> None:
        super().__init__(eni)
        self.network_card_index = getattr(eni, "sandbox_card", 0)


class SandboxInstance(MotoInstance):  # type: ignore[misc]
    """An instance whose states are those of its host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enter(_PENDING)
        self.visible_at = 0.0

    @property
    def emulator(self) -> Emulator:
        return cast(Emulator, self.ec2_backend.emulator)

    def enter(self, state: tuple[str, int]) -> None:
        self._state = instance_models.InstanceState(*state)

    @property
    def instance_status(self) -> dict[str, Any]:
        return self._status()

    @property
    def system_status(self) -> dict[str, Any]:
        return self._status()

    def _status(self) -> dict[str, Any]:
        if self.state != "running":
            return {"Status": "not-applicable"}
        ready = self.emulator.hosts.ssh_ready(self.id)
        detail = {"Name": "reachability", "Status": "passed" if ready else "initializing"}
        return {"Status": "ok" if ready else "initializing", "Details": [detail]}

    @property
    def network_interfaces(self) -> list[Any]:
        return [] if self.state == "terminated" else list(super().network_interfaces)

    @property
    def private_ip_address(self) -> str | None:
        return None if self.state == "terminated" else cast(str | None, super().private_ip_address)

    @property
    def private_dns_name(self) -> str:
        return "" if self.state == "terminated" else str(super().private_dns_name)

    @property
    def public_ip_address(self) -> str | None:
        return None if self.state == "terminated" else cast(str | None, super().public_ip_address)

    @property
    def public_dns_name(self) -> str | None:
        return None if self.state == "terminated" else cast(str | None, super().public_dns_name)

    def terminate(self) -> Any:
        """Ask the host to end; `host_ended` does the rest."""
        previous = instance_models.InstanceState(self._state.name, self._state.code)
        if self.state == "stopped":
            self._tear_down("Client.UserInitiatedShutdown: User initiated shutdown")
        elif self.state != "terminated":
            self.enter(_SHUTTING_DOWN)
            self.emulator.hosts.stop([self.id])
        return previous

    def host_ended(self) -> None:
        asked = self.state == "shutting-down"
        by = "Client.UserInitiatedShutdown: User initiated shutdown"
        if not asked:
            by = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
        if asked or self.instance_initiated_shutdown_behavior == "terminate":
            self._tear_down(by)
        elif self.state != "terminated":
            self.enter(_STOPPED)
            self.state_reason = instance_models.StateReason(by, by.split(":")[0])

    def _tear_down(self, by: str) -> None:
        if self.state == "terminated":
            return
        for address in self.ec2_backend.addresses:
            if address.eni and address.eni.instance is self:
                self.ec2_backend.disassociate_address(address=address.public_ip)
        super().terminate()
        self.state_reason = instance_models.StateReason(by, by.split(":")[0])
        for interface in self.nics.values():
            interface.public_ip = None
            if interface.id in self.ec2_backend.enis:  # not deleted on termination
                interface.instance = interface.attachment_id = interface.device_index = None
                interface.status = "available"


class SandboxBackend(MotoBackend):  # type: ignore[misc]
    """One region of one account."""

    emulator: Emulator  # set by install
    _url_module = ec2_urls  # moto derives it from the name of the class's module

    def __init__(self, region_name: str, account_id: str) -> None:
        self.placement_groups = dict[str, dict[str, Any]]()
        self.launches = dict[str, tuple[str, Any]]()  # ClientToken -> digest of the request, reservation
        self.consoles_read = set[str]()
        super().__init__(region_name, account_id)
        for name in IMAGES:
            image_id = image_of(name, region_name)
            self.amis[image_id] = Ami(
                self,
                image_id,
                name=f"Deep Learning {name}",
                owner_id="898082745236",
                owner_alias="amazon",
                public=True,
                virtualization_type="hvm",
                architecture="x86_64",
                hypervisor="xen",
                root_device_type="ebs",
                root_device_name="/dev/sda1",
                region_name=f"{region_name}a",
                boot_mode="uefi-preferred",
            )
        self._born_with = set(self._resources())

    def create_default_vpc(self) -> Any:
        """moto's is always 172.31.0.0/16, which the hosts may not have, and has no way out."""
        vpc = self.create_vpc(cidr_block=self.emulator.hosts.vpc_cidr, is_default=True)
        blocks = ipaddress.ip_network(self.emulator.hosts.vpc_cidr).subnets(new_prefix=20)
        for zone, block in zip(self.describe_availability_zones(), blocks, strict=False):
            subnet = self.create_subnet(vpc.id, str(block), availability_zone=zone.name)
            subnet.default_for_az = subnet.map_public_ip_on_launch = True
        gateway = self.create_internet_gateway()
        self.attach_internet_gateway(gateway.id, vpc.id)
        self.create_route(self._main_table(vpc.id).id, "0.0.0.0/0", gateway_id=gateway.id)
        return vpc

    def create_subnet(self, *args: Any, **kwargs: Any) -> Any:
        """moto takes the first subnet of a zone for the default one, which hands out public addresses."""
        subnet = super().create_subnet(*args, **kwargs)
        subnet.default_for_az = subnet.map_public_ip_on_launch = False
        return subnet

    def made_by_users(self) -> list[str]:
        return [name for name in self._resources() if name not in self._born_with]

    def _resources(self) -> list[str]:
        groups = [group for by_id in self.groups.values() for group in by_id.values() if group.name != "default"]
        subnets = [subnet_id for by_id in self.subnets.values() for subnet_id in by_id]
        tables = [table.id for table in self.route_tables.values() if table.main_association_id is None]
        return [
            *(instance.id for instance in self.all_instances() if instance.state != "terminated"),
            *self.volumes,
            *self.enis,
            *(address.allocation_id for address in self.addresses),
            *(group.id for group in groups),
            *subnets,
            *tables,
            *self.internet_gateways,
            *self.vpcs,
            *(f"key pair {name}" for name in self.key_pairs),
            *(f"placement group {name}" for name in self.placement_groups),
        ]

    def has_way_out(self, subnet: Any) -> bool:
        """Does the subnet's route table lead to an internet gateway?"""
        tables = [table for table in self.route_tables.values() if table.vpc_id == subnet.vpc_id]
        own = [table for table in tables if subnet.id in table._associations.values()]
        return any(
            route.gateway is not None and route.gateway.id in self.internet_gateways
            for table in own or [self._main_table(subnet.vpc_id)]
            for route in table.routes
        )

    def _main_table(self, vpc_id: str) -> Any:
        return next(t for t in self.route_tables.values() if t.vpc_id == vpc_id and t.main_association_id)

    def interfaces(self, **wanted: str) -> list[Any]:
        """Network interfaces whose attributes have these values."""
        return [
            interface
            for interface in self.enis.values()
            if all(getattr(interface, name) == value for name, value in wanted.items())
        ]

    def check_instances_visible(self, ids: Sequence[str]) -> None:
        now = time.monotonic()
        hidden = [instance.id for instance in self.all_instances() if instance.visible_at > now]
        if unknown := [instance_id for instance_id in ids if instance_id in hidden]:
            message = f"The instance ID '{unknown[0]}' does not exist"
            raise EC2ClientError("InvalidInstanceID.NotFound", message)


class SandboxResponse(MotoResponse):  # type: ignore[misc]
    """One request. moto finds an action by the method of its name in snake case."""

    emulator: Emulator  # set by install

    @property
    def backend(self) -> SandboxBackend:
        return cast(SandboxBackend, self.ec2_backend)

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._dispatch(*args, **kwargs)
        except OperationNotFoundError:
            message = f"The action {self._get_action()} is not valid for this web service."
            return self._answer_error("InvalidAction", message, 400)

    def call_action(self) -> Any:
        action = str(self._get_action() or "")
        if fault := self.emulator.faults.hit(action):
            message = fault.message or _fault_message(fault.code, action)
            return self._answer_error(fault.code, message, fault.http_status)
        try:
            answer = super().call_action()
        except EC2Fault as error:
            return self._answer_error(error.code, error.message, error.status)
        except NotImplementedError as error:  # moto: unknown action or filter; botocore cannot read its HTML page
            return self._answer_error("UnsupportedOperation", f"The sandbox does not model this: {error}", 400)
        if not action.startswith(("Describe", "Get")):
            self.emulator.refresh_routes()
        return answer

    def _answer_error(self, code: str, message: str, status: int) -> Any:
        _, headers, body = self.serialized(ActionResult(EC2ClientError(code, message)))
        headers["status"] = str(status)
        headers, body = self._enrich_response(headers, body)
        return status, headers, body

    # --- placement groups: moto has none

    def create_placement_group(self) -> Any:
        self.error_on_dryrun()
        name, strategy = str(self._get_param("GroupName")), str(self._get_param("Strategy", "cluster"))
        if name in self.backend.placement_groups:
            message = f"The placement group '{name}' already exists."
            raise EC2ClientError("InvalidPlacementGroup.Duplicate", message)
        if strategy not in ("cluster", "spread", "partition"):
            raise EC2ClientError("InvalidParameterValue", f"Value ({strategy}) for parameter strategy is invalid.")
        group_id = f"pg-{_hex(self.region, name, time.time_ns())}"
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
            and _fits(self._filters_from_querystring(), {name: group[key] for name, key in keys.items()}, group["Tags"])
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

    def _check_placement_group(self, name: str) -> None:
        if name not in self.backend.placement_groups:
            message = f"The placement group '{name}' is unknown."
            raise EC2ClientError("InvalidPlacementGroup.Unknown", message)

    # --- instances

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
            message = fault.message or _fault_message(fault.code, "RunInstances", launch.instance_type, launch.zone)
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
            self._finish_interfaces(instance, launch, tags)
        if token:
            self.backend.launches[token] = (digest, reservation)
        self.emulator.hosts.start(
            [self._host_request(instance) for instance in reservation.instances],
            self.emulator.running,
            self.emulator.ended,
        )
        return ActionResult(reservation)

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
            instance_type=instance.instance_type,
            subnet_cidr=instance.nics[0].subnet.cidr_block,
        )

    def describe_instances(self) -> Any:
        self.backend.check_instances_visible(self._get_param("InstanceIds", []))
        result = super().describe_instances()
        now = time.monotonic()
        for reservation in result.result["Reservations"]:  # copies: moto makes them anew for every request
            reservation.instances = [i for i in reservation.instances if i.visible_at <= now]
        result.result["Reservations"] = [r for r in result.result["Reservations"] if r.instances]
        return result

    def describe_instance_status(self) -> Any:
        self.backend.check_instances_visible(self._get_param("InstanceIds", []))
        return super().describe_instance_status()

    def terminate_instances(self) -> Any:
        ids = self._get_param("InstanceIds", [])
        self.backend.check_instances_visible(ids)
        self.error_on_dryrun()
        states = [
            {
                "InstanceId": instance.id,
                "CurrentState": {"Code": instance.state_code, "Name": instance.state},
                "PreviousState": previous,
            }
            for instance, previous in self.backend.terminate_instances(ids)
        ]
        return ActionResult({"TerminatingInstances": states})

    def create_tags(self) -> Any:
        self.backend.check_instances_visible(self._get_param("Resources", []))
        return super().create_tags()

    def start_instances(self) -> Any:
        raise NotImplementedError("StartInstances")

    def stop_instances(self) -> Any:
        raise NotImplementedError("StopInstances")

    def reboot_instances(self) -> Any:
        raise NotImplementedError("RebootInstances")

    def get_console_output(self) -> Any:
        """The first look finds nothing, as on AWS, where the console is read out now and then."""
        instance = self.backend.get_instance(self._get_param("InstanceId"))
        self.backend.check_instances_visible([instance.id])
        answer: dict[str, Any] = {"InstanceId": instance.id, "Timestamp": utcnow()}
        text = self.emulator.hosts.console(instance.id) if instance.id in self.backend.consoles_read else ""
        self.backend.consoles_read.add(instance.id)
        if text:
            answer["Output"] = Base64EncodedString.from_raw_string(text[-_CONSOLE_BYTES:])
        return ActionResult(answer)

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
            and _fits(
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

    # --- Elastic IPs

    def allocate_address(self) -> Any:
        if len(self.backend.addresses) >= _MAX_ADDRESSES:
            raise EC2ClientError("AddressLimitExceeded", "The maximum number of addresses has been reached.")
        return super().allocate_address()

    def associate_address(self) -> Any:
        instance_id, interface_id = self._get_param("InstanceId"), self._get_param("NetworkInterfaceId")
        if instance_id:
            instance = self.backend.get_instance(instance_id)
            if len(instance.nics) > 1:
                raise EC2ClientError(
                    "InvalidInstanceID",
                    f"There are multiple interfaces attached to instance '{instance_id}'."
                    " Please specify an interface ID for the operation instead.",
                )
            interface = instance.nics[0]
        else:
            interface = self.backend.get_network_interface(interface_id)
            instance = interface.instance
        if instance and instance.state != "running":
            message = f"The {instance.state} instance '{instance.id}' is not in a valid state for this operation."
            raise EC2ClientError("InvalidInstanceID", message)
        if not any(
            gateway.vpc and gateway.vpc.id == interface.vpc_id for gateway in self.backend.internet_gateways.values()
        ):
            message = f"Network {interface.vpc_id} is not attached to any internet gateway"
            raise EC2ClientError("Gateway.NotAttached", message)
        result = super().associate_address()
        for address in self.backend.addresses:
            if address.eni is interface:
                address.instance = instance  # moto forgets it where the interface was named
        return result

    def release_address(self) -> Any:
        allocation = self._get_param("AllocationId")
        if allocation:
            address = self.backend.address_by_allocation([allocation])[0]
            if address.association_id:
                raise EC2ClientError("InvalidIPAddress.InUse", f"Address {address.public_ip} is in use.")
        return super().release_address()

    # --- what AWS refuses to delete while it is in use

    def delete_security_group(self) -> Any:
        backend = self.backend
        group = backend.get_security_group_by_name_or_id(self._get_param("GroupId") or self._get_param("GroupName"))
        if group and group.name == "default":
            message = 'the specified group: "' + str(group.id) + '" name: "default" cannot be deleted by a user'
            raise EC2ClientError("CannotDelete", message)
        if group and (_is_used(group, backend) or _is_referred_to(group, backend)):
            raise DependencyViolationError(f"resource {group.id} has a dependent object")
        return super().delete_security_group()

    def delete_subnet(self) -> Any:
        subnet_id = str(self._get_param("SubnetId"))
        if self.backend.interfaces(subnet_id=subnet_id):
            raise DependencyViolationError(f"The subnet '{subnet_id}' has dependencies and cannot be deleted.")
        return super().delete_subnet()

    def detach_internet_gateway(self) -> Any:
        vpc_id = str(self._get_param("VpcId"))
        if any(interface.public_ip for interface in self.backend.interfaces(vpc_id=vpc_id)):
            raise DependencyViolationError(
                f"Network {vpc_id} has some mapped public address(es)."
                " Please unmap those public address(es) before detaching the gateway."
            )
        return super().detach_internet_gateway()

    def delete_vpc(self) -> Any:
        vpc_id = str(self._get_param("VpcId"))
        gateways = [g for g in self.backend.internet_gateways.values() if g.vpc and g.vpc.id == vpc_id]
        groups = [group for group in self.backend.groups[vpc_id].values() if group.name != "default"]
        if gateways or groups:
            raise DependencyViolationError(f"The vpc '{vpc_id}' has dependencies and cannot be deleted.")
        return super().delete_vpc()


@dataclass(frozen=True)
class Launch:
    """A checked RunInstances request."""

    instance_type: str
    zone: str
    count: int
    group_name: str
    interfaces: tuple[Mapping[str, Any], ...]  # as asked for, ordered by card and device


class SandboxParameters(MotoParameters):  # type: ignore[misc]
    """SSM's public parameters, with those of the Deep Learning AMIs."""

    def __init__(self, account_id: str, region_name: str) -> None:
        super().__init__(account_id, region_name)
        for name in IMAGES:
            parameter = _IMAGE_PARAMETER.format(name=name)
            self[parameter] = [
                ssm_models.Parameter(
                    account_id=account_id,
                    name=parameter,
                    value=image_of(name, region_name),
                    parameter_type="String",
                    description=None,
                    allowed_pattern=None,
                    keyid=None,
                    last_modified_date=utcnow(),
                    version=1,
                    data_type="aws:ec2:image",
                )
            ]


def image_of(name: str, region: str) -> str:
    """The id of an image; an AMI has another one in each region."""
    return f"ami-{_hex(name, region)}"


def install(hosts: NodeHosts, faults: FaultBook) -> tuple[Emulator, Callable[..., Any]]:
    """Put the classes above in moto's places; what to ask, and the WSGI application that answers requests.

    Once in a process. Raises RuntimeError where moto is not the moto that this was written for.
    """
    _check_touch_points()
    emulator = Emulator(hosts, faults)
    SandboxBackend.emulator = SandboxResponse.emulator = emulator
    ec2_urls.url_paths["{0}/"] = SandboxResponse.dispatch
    ec2_models.ec2_backends.backend = SandboxBackend
    instance_models.Instance = SandboxInstance
    eni_models.Attachment = SandboxAttachment
    eni_models.random_public_ip = emulator.free_public_address
    eip_models.random_ip = emulator.free_public_address
    ssm_models.ParameterDict = SandboxParameters
    ec2_utils.filter_dict_attribute_mapping.update(
        {"placement-group-name": "placement.group_name", "client-token": "client_token"}
    )
    ec2_utils.EC2_RESOURCE_TO_PREFIX["placement-group"] = "pg"
    ec2_utils.EC2_PREFIX_TO_RESOURCE["pg"] = "placement-group"
    return emulator, werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)


def _check_touch_points() -> None:
    places = {
        "moto.ec2.urls.url_paths": "{0}/" in ec2_urls.url_paths,
        "moto.ec2.models.ec2_backends": ec2_models.ec2_backends.backend is EC2Backend,
        "no request was answered yet": not list(ec2_models.ec2_backends.iter_backends()),
        "EC2Backend.create_default_vpc": hasattr(EC2Backend, "create_default_vpc"),
        "moto.ec2.models.instances.Instance": isinstance(getattr(instance_models, "Instance", None), type),
        "Instance._state": "_state" in instance_models.Instance.__init__.__code__.co_names,
        "Instance._placement": "_placement" in instance_models.Instance.__init__.__code__.co_names,
        "Attachment.network_card_index": "network_card_index" in eni_models.Attachment.__init__.__code__.co_names,
        "elastic_network_interfaces.random_public_ip": hasattr(eni_models, "random_public_ip"),
        "elastic_ip_addresses.random_ip": hasattr(eip_models, "random_ip"),
        "moto.ssm.models.ParameterDict": hasattr(ssm_models, "ParameterDict"),
        "moto.ec2.utils.filter_dict_attribute_mapping": hasattr(ec2_utils, "filter_dict_attribute_mapping"),
        "moto.ec2.utils.EC2_RESOURCE_TO_PREFIX": hasattr(ec2_utils, "EC2_RESOURCE_TO_PREFIX"),
        **{
            f"BaseResponse.{name}": hasattr(BaseResponse, name)
            for name in ("_dispatch", "call_action", "_get_action", "serialized", "_enrich_response", "_get_param")
        },
    }
    if missing := [name for name, there in places.items() if not there]:
        raise RuntimeError(f"this moto is not the one that the sandbox was written for: {', '.join(missing)}")


def _hex(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:17]


def _fault_message(code: str, action: str, instance_type: str = "", zone: str = "") -> str:
    if code == "InsufficientInstanceCapacity":
        return (
            f"We currently do not have sufficient {instance_type or 'such'} capacity in the Availability Zone you"
            f" requested{f' ({zone})' if zone else ''}. Our system will be working on provisioning additional capacity."
        )
    return "Request limit exceeded." if code == "RequestLimitExceeded" else f"{code}, asked for by a fault of {action}."


def _fits(filters: Mapping[str, Sequence[str]], values: Mapping[str, str], tags: Sequence[Mapping[str, str]]) -> bool:
    """EC2's filters: all of them, each by any of its values, which may hold `*`."""
    for name, wanted in filters.items():
        if name.startswith("tag:"):
            there = [tag["Value"] for tag in tags if tag["Key"] == name[4:]]
        elif name == "tag-key":
            there = [tag["Key"] for tag in tags]
        elif name in values:
            there = [values[name]]
        else:
            raise EC2ClientError("InvalidParameterValue", f"The filter '{name}' is invalid")
        patterns = [ec2_utils.simple_aws_filter_to_re(value) for value in wanted]
        if not any(re.match(pattern, value) for pattern in patterns for value in there):
            return False
    return True


def _lets_in(groups: Any, source: str, port: int) -> bool:
    """Does any of the security groups allow TCP from `source` to `port`?"""
    caller = ipaddress.IPv4Network(source)
    return any(
        rule.ip_protocol == "-1" or (rule.ip_protocol == "tcp" and rule.from_port <= port <= rule.to_port)
        for group in groups
        for rule in group.ingress_rules
        for block in _blocks(rule)
        if caller.subnet_of(block)
    )


def _blocks(rule: Any) -> list[ipaddress.IPv4Network]:
    text = rule.ip_range.get("CidrIp") if rule.ip_range else None
    return [ipaddress.IPv4Network(text)] if text else []


def _is_used(group: Any, backend: SandboxBackend) -> bool:
    return any(group in interface._group_set for interface in backend.enis.values()) or any(
        group in instance.security_groups for instance in backend.all_instances() if instance.state != "terminated"
    )


def _is_referred_to(group: Any, backend: SandboxBackend) -> bool:
    return any(
        (rule.source_group or {}).get("GroupId") == group.id
        for by_id in backend.groups.values()
        for other in by_id.values()
        if other.id != group.id
        for rule in [*other.ingress_rules, *other.egress_rules]
    )


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
            "NetworkNodes": [f"nn-{_hex(*layer)}" for layer in (spine, aggregate, leaf)],
            "AvailabilityZone": zone,
            "ZoneId": next((one.zone_id for one in zones if one.name == zone), ""),
        }
        yield row | ({"GroupName": instance.placement.group_name} if instance.placement.group_name else {})


def _facts(instance: SandboxInstance, interrupted: bool) -> InstanceFacts:
    backend = instance.ec2_backend
    association = backend.iam_instance_profile_associations.get(instance.id)
    roles = association.iam_instance_profile.roles if association else []
    interface = instance.nics[0]
    return InstanceFacts(
        instance_id=instance.id,
        instance_type=instance.instance_type,
        image_id=instance.image_id,
        launch_index=int(instance.ami_launch_index),
        private_ip=str(instance.private_ip_address),
        private_dns=instance.private_dns_name,
        public_ip=instance.public_ip_address or "",
        mac=interface.mac_address,
        subnet_id=interface.subnet.id,
        vpc_id=interface.vpc_id,
        zone=str(instance.availability_zone),
        region=backend.region_name,
        placement_group=instance.placement.group_name,
        account=backend.account_id,
        security_groups=tuple(group.name for group in interface.group_set),
        role=roles[0].name if roles else "",
        tags={tag["key"]: tag["value"] for tag in instance.get_tags()},
        user_data=base64.b64decode(str(instance.user_data or "")),
        tokens_required=instance.metadata_options.http_tokens == "required",
        enabled=instance.metadata_options.http_endpoint == "enabled",
        tags_allowed=instance.metadata_options.instance_metadata_tags == "enabled",
        interrupted=interrupted,
    )
