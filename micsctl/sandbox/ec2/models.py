"""moto's models of an instance and of an interface's place in it, with what moto lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from micsctl.sandbox.ec2.moto_parts import MotoAttachment, MotoInstance, instance_models

if TYPE_CHECKING:
    from micsctl.sandbox.ec2.emulator import Emulator

PENDING, RUNNING = ("pending", 0), ("running", 16)
_SHUTTING_DOWN, _STOPPED = ("shutting-down", 32), ("stopped", 80)


class SandboxAttachment(MotoAttachment):  # type: ignore[misc]
    """moto says network card 0 for all."""

    def __init__(self, eni: Any) -> None:
        super().__init__(eni)
        self.network_card_index = getattr(eni, "sandbox_card", 0)


class SandboxInstance(MotoInstance):  # type: ignore[misc]
    """An instance whose states are those of its host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enter(PENDING)
        self.visible_at = 0.0
        self._ended_by = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"

    @property
    def emulator(self) -> Emulator:
        return cast("Emulator", self.ec2_backend.emulator)

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
        self._end("Client.UserInitiatedShutdown: User initiated shutdown")
        return previous

    def interrupt(self) -> None:
        """AWS takes the instance back."""
        self._end("Server.SpotInstanceTermination: Spot instance termination")

    def _end(self, by: str) -> None:
        if self.state == "stopped":
            self._tear_down(by)
        elif self.state in ("pending", "running"):
            self._ended_by = by
            self.enter(_SHUTTING_DOWN)
            self.emulator.hosts.stop([self.id])

    def fail(self) -> None:
        """The host could not be started."""
        self._tear_down("Server.InternalError: Internal error on launch")

    def host_ended(self) -> None:
        by = self._ended_by
        if self.state == "shutting-down" or self.instance_initiated_shutdown_behavior == "terminate":
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
