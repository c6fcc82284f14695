"""The intent: what `up` was about to create, written before each create call. Tags in AWS remain the truth."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class LaunchIntent:
    """A RunInstances call that was about to be made."""

    token: str  # its ClientToken
    zone: str
    ends_at: int  # Unix seconds
    digest: str  # of all its other parameters
    at: datetime


@dataclass(frozen=True)
class Journal:
    """Lines of JSON; each is on the disk before `write` returns."""

    path: Path

    def write(self, event: str, **details: Any) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details}
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # a line torn by a crash must not swallow this one
            os.write(handle, ("\n" + json.dumps(record) + "\n").encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def intend(self, action: str, **details: str | int) -> None:
        """Before a create call; has the form of `micsctl.aws.create.Intend`."""
        self.write("intent", action=action, **details)

    def read(self) -> list[Record]:
        """All records since the last `down`; lines torn by a crash are left out."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return since_down(_records(text.splitlines()))


def _records(lines: Iterable[str]) -> list[Record]:
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            found.append(record)
    return found


def since_down(records: Sequence[Record]) -> list[Record]:
    last = max((place for place, record in enumerate(records) if record["event"] == "down"), default=-1)
    return list(records[last + 1 :])


def launched_ids(records: Iterable[Record]) -> list[str]:
    """Instances that AWS confirmed, in the order of launch."""
    return [id for record in records if record["event"] == "launched" for id in record["instances"]]


def open_launch(records: Sequence[Record]) -> LaunchIntent | None:
    """The last launch whose outcome is not known: the answer got lost, or the laptop died."""
    settled = {record["token"] for record in records if record["event"] in ("launched", "refused")}
    for record in reversed(records):
        if record["event"] == "intent" and record["action"] == "RunInstances":
            if record["token"] in settled:
                return None
            return LaunchIntent(
                token=record["token"],
                zone=record["zone"],
                ends_at=int(record["ends_at"]),
                digest=record["digest"],
                at=datetime.fromisoformat(record["at"]),
            )
    return None
