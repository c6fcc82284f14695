"""What moto does not know: the hosts, the faults, and which public address leads where."""

from __future__ import annotations

import base64
import ipaddress
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from micsctl.sandbox.ec2.models import RUNNING, SandboxInstance
from micsctl.sandbox.ec2.moto_parts import EC2ClientError, ec2_models, iam_models
from micsctl.sandbox.faults import FaultBook
from micsctl.sandbox.hosts import NodeHosts
from micsctl.sandbox.imds import InstanceFacts

if TYPE_CHECKING:
    from micsctl.sandbox.ec2.backend import SandboxBackend


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

    def instance_profiles(self, account: str) -> list[Any]:
        return list(iam_models.iam_backends[account]["aws"].get_instance_profiles())

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
                    instance.enter(RUNNING)
            self.refresh_routes()

    def ended(self, instance_id: str) -> None:
        with self.lock:
            for instance in self.instances():
                if instance.id == instance_id:
                    instance.host_ended()
            self.refresh_routes()

    def end_interrupted(self, now: float) -> None:
        """End the instances whose spot notice has run out."""
        for fault in self.faults.due(now):
            with self.lock:
                for instance in self.instances():
                    if fault.instance in (None, instance.id):
                        instance.interrupt()

    def facts(self, private_ip: str = "", instance_id: str = "") -> InstanceFacts | None:
        """What the instance metadata service says to the instance with this address or id."""
        with self.lock:
            for instance in self.instances():
                if instance.state in ("pending", "running") and (
                    instance.private_ip_address == private_ip if private_ip else instance.id == instance_id
                ):
                    return _facts(instance, self.faults.interrupted_at(instance.id))
        return None


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


def _facts(instance: SandboxInstance, interrupted_at: float | None) -> InstanceFacts:
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
        interrupted_at=datetime.fromtimestamp(interrupted_at, UTC) if interrupted_at else None,
    )
