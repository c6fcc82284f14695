"""The completion mark of a checkpoint: the last file written, and what it says. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MARK = "complete.json"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps done, and the first sample that no step has seen."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree on with the run that resumes from it, by name; values that JSON has.

    model  another one is refused
    data   what the sample cursor depends on: with another one, samples are counted from 0 again
    """

    model: Mapping[str, object]
    data: Mapping[str, object]


@dataclass(frozen=True)
class FileSum:
    """Size and CRC-32 of one file, as its writer computed them while writing."""

    size_bytes: int
    crc32: str


@dataclass(frozen=True)
class Mark:
    progress: Progress
    identity: Identity
    files: Mapping[str, FileSum]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Mark:
        """Raises ValueError where it is not a whole mark."""
        try:
            raw: dict[str, Any] = json.loads(text)
            files = {name: FileSum(**value) for name, value in raw["files"].items()}
            return cls(Progress(**raw["progress"]), Identity(**raw["identity"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{MARK} is not whole, or of another version: {error!r}") from error


def folder_name(step: int, attempt: int) -> str:
    """step-40; step-40.2 is a second whole checkpoint of the same step."""
    return f"step-{step}" if attempt == 1 else f"step-{step}.{attempt}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's folder; None for any other name. They sort from old to new."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def size_problem(mark: Mark, sizes_bytes: Mapping[str, int]) -> str | None:
    """The first listed file that is missing or has another size; None where all are there."""
    for name, listed in sorted(mark.files.items()):
        if name not in sizes_bytes:
            return f"{name} is missing"
        if sizes_bytes[name] != listed.size_bytes:
            return f"{name} has {sizes_bytes[name]} bytes instead of {listed.size_bytes}"
    return None


def differences(saved: Mapping[str, object], own: Mapping[str, object]) -> str:
    """ "hidden 12 instead of 24, ..." for the names on which they differ; "" where they agree."""
    saved, own = json.loads(json.dumps(saved)), json.loads(json.dumps(own))
    return ", ".join(
        f"{name} {saved.get(name)} instead of {own.get(name)}"
        for name in sorted({**saved, **own})
        if saved.get(name) != own.get(name)
    )
