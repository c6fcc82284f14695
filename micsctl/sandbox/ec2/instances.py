"""Instances after their launch."""

from __future__ import annotations

import time
from typing import Any

from micsctl.sandbox.ec2.moto_parts import ActionResult, Base64EncodedString, utcnow
from micsctl.sandbox.ec2.request import Request

_CONSOLE_BYTES = 65536


class InstanceActions(Request):
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
