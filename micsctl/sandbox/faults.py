"""Faults on demand: what AWS does on a bad day."""

from __future__ import annotations

import threading
import time
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
_HIDDEN_SECONDS = 2.0
_NOTICE_SECONDS = 120.0


@dataclass(frozen=True)
class Fault:
    """One rule. The first that fits a request, and is not used up, answers it.

    Two codes are not errors: `DelayedVisibility` on RunInstances hides the new instances from every Describe call for
    `seconds`; `SpotInterruption` (of any action) puts a notice into the instances' metadata and ends them after
    `seconds`.
    """

    action: str  # "RunInstances", ...; "*" = every one
    code: str
    zone: str | None = None  # RunInstances only
    times: int | None = None  # None = for ever
    skip: int = 0  # so many requests pass first
    seconds: float | None = None  # None = 2 for DelayedVisibility, AWS's two minutes for SpotInterruption
    instance: str | None = None  # SpotInterruption only; None = all
    ends_at: float | None = None  # SpotInterruption: Unix time, set when the rule is added

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

    def add(self, fault: Fault, now: float | None = None) -> None:
        if fault.code == SPOT_INTERRUPTION:
            seconds = _NOTICE_SECONDS if fault.seconds is None else fault.seconds
            fault = replace(fault, ends_at=(time.time() if now is None else now) + seconds)
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
        if fault is None:
            return 0.0
        return _HIDDEN_SECONDS if fault.seconds is None else fault.seconds

    def interrupted_at(self, instance_id: str) -> float | None:
        """When this instance will end, as its metadata announce it; None while nothing is announced."""
        ends = [f.ends_at for f in self.all() if f.ends_at and f.times != 0 and f.instance in (None, instance_id)]
        return min(ends, default=None)

    def due(self, now: float) -> list[Fault]:
        """The interruptions whose time has come, each once."""
        with self._lock:
            found = [fault for fault in self._faults if fault.ends_at and fault.ends_at <= now and fault.times != 0]
            self._faults = [replace(fault, times=0) if fault in found else fault for fault in self._faults]
        return found

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
