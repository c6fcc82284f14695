"""Faults on demand: what AWS does on a bad day."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# codes that AWS documents as server errors; everything else is a client error
_SERVER_STATUS = {
    "InsufficientInstanceCapacity": 500,
    "InsufficientCapacity": 500,
    "InternalError": 500,
    "RequestLimitExceeded": 503,
    "Unavailable": 503,
}
DELAYED_VISIBILITY = "DelayedVisibility"
SPOT_INTERRUPTION = "SpotInterruption"


@dataclass(frozen=True)
class Fault:
    """One rule. The first that fits a request, and is not used up, answers it.

    Two codes are not errors: `DelayedVisibility` on RunInstances hides the new instances from every Describe call for
    `seconds`; `SpotInterruption` (of any action) puts a notice into the instances' metadata.
    """

    action: str  # "RunInstances", ...; "*" = every one
    code: str
    zone: str | None = None  # RunInstances only
    times: int | None = None  # None = for ever
    skip: int = 0  # so many requests pass first
    seconds: float = 2.0

    @property
    def http_status(self) -> int:
        """What AWS documents for the code."""
        return _SERVER_STATUS.get(self.code, 400)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fault:
        """Raises ValueError for unknown or missing keys."""
        known = {field.name for field in fields(cls)}
        if not {"action", "code"} <= set(data) <= known:
            raise ValueError(f"a fault has the keys {sorted(known)}, got {sorted(data)}")
        return cls(**data)


class FaultBook:
    """The rules in force."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def all(self) -> list[Fault]:
        with self._lock:
            return list(self._faults)

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def hit(self, action: str, zone: str | None = None) -> Fault | None:
        """The error that answers this request, which uses its rule up by one.

        RunInstances asks twice: without a zone for rules that name none, then with its zone for those that do.
        """
        return self._take(
            lambda fault: (
                fault.code not in (DELAYED_VISIBILITY, SPOT_INTERRUPTION)
                and fault.action in ("*", action)
                and fault.zone == zone
            )
        )

    def hidden_seconds(self) -> float:
        """How long the instances of this RunInstances stay invisible."""
        fault = self._take(lambda fault: fault.code == DELAYED_VISIBILITY)
        return fault.seconds if fault else 0.0

    def spot_interruption(self) -> bool:
        return any(fault.code == SPOT_INTERRUPTION for fault in self.all())

    def _take(self, fits: Callable[[Fault], bool]) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not fits(fault) or fault.times == 0:
                    continue
                if fault.skip > 0:
                    self._faults[index] = replace(fault, skip=fault.skip - 1)
                    continue
                if fault.times is not None:
                    self._faults[index] = replace(fault, times=fault.times - 1)
                return fault
        return None
