"""What AWS refuses to delete while it is in use, and moto deletes."""

from __future__ import annotations

from typing import Any

from micsctl.sandbox.ec2.backend import SandboxBackend
from micsctl.sandbox.ec2.moto_parts import DependencyViolationError, EC2ClientError
from micsctl.sandbox.ec2.request import Request


class NetworkActions(Request):
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
