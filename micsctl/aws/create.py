"""What every `ensure_x` of this package shares: the intent before a create call, patience after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from botocore.exceptions import ClientError

from micsctl.aws.errors import code_of

T = TypeVar("T")
_VISIBLE_AFTER_SECONDS = 60  # EC2 is eventually consistent: "not found" just after a create means "not yet"


class Intend(Protocol):
    """Records durably what is about to be created, before the call."""

    def __call__(self, action: str, **details: str | int) -> None: ...


def soon(call: Callable[[], T], *, every_seconds: float) -> T:
    """Call until the resource that was just created is known everywhere, for a minute at most."""
    deadline = time.monotonic() + _VISIBLE_AFTER_SECONDS
    while True:
        try:
            return call()
        except ClientError as error:
            if not is_not_found(error) or time.monotonic() > deadline:
                raise
        time.sleep(every_seconds)


def is_not_found(error: ClientError) -> bool:
    """InvalidVpcID.NotFound, InvalidGroup.NotFound, InvalidPlacementGroup.Unknown, InvalidAllocationID.NotFound ..."""
    return code_of(error).endswith((".NotFound", ".Unknown"))
