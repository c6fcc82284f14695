"""One tree of errors. Each says four things: what failed, why, what now exists and costs money, what to type next."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The documented exit codes of every command."""

    DONE = 0
    FAILURE = 1
    USAGE = 2
    CAPACITY = 3
    QUOTA_OR_PERMISSION = 4
    CREDENTIALS = 5
    PARTIAL = 6
    HEALTH = 7
    JOB = 8
    INTERRUPTED = 130


class MicsctlError(Exception):
    """A failure that is explained to the user instead of shown as a traceback.

    what    one line: which step failed, on what
    why     the cause, several lines allowed (an AWS error carries its code and request id here)
    costs   what exists now and costs money; "" where the command created nothing
    next    the command to type next
    """

    exit_code = ExitCode.FAILURE

    def __init__(self, what: str, why: str = "", *, costs: str = "", next: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.costs, self.next = what, why, costs, next

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": False,
            "error": {
                "what": self.what,
                "why": self.why,
                "costs": self.costs,
                "next": self.next,
                "exit_code": int(self.exit_code),
            },
        }


class UsageError(MicsctlError):
    """Wrong flag, wrong mics.yaml, or a missing program on this machine."""

    exit_code = ExitCode.USAGE


class CapacityError(MicsctlError):
    """AWS has no machines of this kind to give right now."""

    exit_code = ExitCode.CAPACITY


class PermissionDenied(MicsctlError):
    """A quota or a permission of the account stands in the way."""

    exit_code = ExitCode.QUOTA_OR_PERMISSION


class CredentialsError(MicsctlError):
    """No credentials, expired ones, or a clock that makes them look expired."""

    exit_code = ExitCode.CREDENTIALS


class PartialError(MicsctlError):
    """The command stopped half-way and something still costs money; `costs` lists it."""

    exit_code = ExitCode.PARTIAL


class HealthError(MicsctlError):
    """A node is not fit to train on."""

    exit_code = ExitCode.HEALTH


class JobError(MicsctlError):
    """The remote job failed; `what` names the first rank that did, its node, and its code."""

    exit_code = ExitCode.JOB


class Interrupted(MicsctlError):
    """Ctrl-C. `costs` says what is left."""

    exit_code = ExitCode.INTERRUPTED
