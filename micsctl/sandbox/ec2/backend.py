"""One region of one account."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from micsctl.sandbox.ec2.images import images
from micsctl.sandbox.ec2.moto_parts import EC2ClientError, MotoBackend, ec2_urls

if TYPE_CHECKING:
    from micsctl.sandbox.ec2.emulator import Emulator


class SandboxBackend(MotoBackend):  # type: ignore[misc]
    """One region of one account."""

    emulator: Emulator  # set by install
    _url_module = ec2_urls  # moto derives it from the name of the class's module

    def __init__(self, region_name: str, account_id: str) -> None:
        self.placement_groups = dict[str, dict[str, Any]]()
        self.launches = dict[str, tuple[str, Any]]()  # ClientToken -> digest of the request, reservation
        self.consoles_read = set[str]()
        super().__init__(region_name, account_id)
        self.amis.update({image.id: image for image in images(self, region_name)})
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
