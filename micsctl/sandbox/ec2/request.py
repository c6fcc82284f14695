"""What all actions share: dispatch, errors, filters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from botocore.model import OperationNotFoundError

from micsctl.sandbox.ec2.backend import SandboxBackend
from micsctl.sandbox.ec2.emulator import Emulator
from micsctl.sandbox.ec2.moto_parts import ActionResult, EC2ClientError, MotoResponse, ec2_utils


class EC2Fault(Exception):
    """An error with an HTTP status of its own; moto answers every ServiceException with 400."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class Request(MotoResponse):  # type: ignore[misc]
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
            return self._answer_error(fault.code, fault_message(fault.code, action), fault.http_status)
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

    def _check_placement_group(self, name: str) -> None:
        if name not in self.backend.placement_groups:
            message = f"The placement group '{name}' is unknown."
            raise EC2ClientError("InvalidPlacementGroup.Unknown", message)


def fault_message(code: str, action: str, instance_type: str = "", zone: str = "") -> str:
    if code == "InsufficientInstanceCapacity":
        return (
            f"We currently do not have sufficient {instance_type or 'such'} capacity in the Availability Zone you"
            f" requested{f' ({zone})' if zone else ''}. Our system will be working on provisioning additional capacity."
        )
    return "Request limit exceeded." if code == "RequestLimitExceeded" else f"{code}, asked for by a fault of {action}."


def fits(filters: Mapping[str, Sequence[str]], values: Mapping[str, str], tags: Sequence[Mapping[str, str]]) -> bool:
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
