"""Elastic IPs."""

from __future__ import annotations

from typing import Any

from micsctl.sandbox.ec2.moto_parts import EC2ClientError
from micsctl.sandbox.ec2.request import Request

_MAX_ADDRESSES = 5


class AddressActions(Request):
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
