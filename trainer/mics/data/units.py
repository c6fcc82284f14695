"""The input of prepare, cut into pieces of work that do not depend on the number of workers."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mics.errors import RunRefusedError

UNIT_BYTES = 4 << 20
STRETCH_BYTES = 1 << 20  # of a text that is encoded at a time
JSON_LINES = {".jsonl", ".ndjson"}


@dataclass(frozen=True)
class Unit:
    """The lines of a file that begin in [start, stop). A .gz file is one unit: it can only be read from its start."""

    path: Path
    start: int
    stop: int
    last: bool  # of its file

    @property
    def input_bytes(self) -> int:
        """As stored, for the progress."""
        return (self.path.stat().st_size if self.packed else self.stop) - self.start

    @property
    def packed(self) -> bool:
        return self.path.suffix == ".gz"

    @property
    def has_json_lines(self) -> bool:
        return (self.path.with_suffix("") if self.packed else self.path).suffix in JSON_LINES


@dataclass(frozen=True)
class Text:
    """A document, or a stretch of a long one."""

    content: bytes
    document: bytes  # what decides whether it is held out for validation: the same for all stretches of a document
    ends: bool


def units_of(paths: tuple[Path, ...]) -> list[Unit]:
    """In the order of the files."""
    found = []
    for path in paths:
        size = path.stat().st_size
        if path.suffix == ".gz":
            found.append(Unit(path, 0, sys.maxsize, last=True))
        else:
            starts = range(0, size, UNIT_BYTES)
            found += [Unit(path, s, min(s + UNIT_BYTES, size), last=s + UNIT_BYTES >= size) for s in starts]
    return found


def texts_of(unit: Unit, field: str) -> Iterator[Text]:
    """The texts of a unit. A file of text is one document, a line of JSON is one.

    Raises RunRefusedError, which names file and line, for a line that is no JSON object with that field.
    """
    return _documents(unit, field) if unit.has_json_lines else _stretches(unit)


def _lines(unit: Unit) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the unit, and where."""
    with _open(unit) as file:
        at = 0
        if unit.start:  # the line that began before belongs to the unit before
            file.seek(unit.start - 1)
            at = unit.start - 1 + len(file.readline())
        while at < unit.stop and (line := file.readline()):
            yield at, line
            at += len(line)


def _open(unit: Unit) -> IO[bytes]:
    return gzip.open(unit.path) if unit.packed else unit.path.open("rb")  # type: ignore[return-value]  # GzipFile reads


def _documents(unit: Unit, field: str) -> Iterator[Text]:
    for at, line in _lines(unit):
        if line.isspace():
            continue
        try:
            content = json.loads(line)
            text = content[field]
            if not isinstance(text, str):
                raise TypeError(f"its {field!r} is no text")
            encoded = text.encode()
            yield Text(encoded, encoded, ends=True)
        except (ValueError, KeyError, TypeError) as error:
            raise RunRefusedError(f"{unit.path}:{_line_number(unit, at)}: {_reason(line, field, error)}") from error


def _reason(line: bytes, field: str, error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no field {field!r}; it has {', '.join(map(repr, json.loads(line)))} (choose one with --field)"
    if isinstance(error, UnicodeError):
        return f"not UTF-8: {error}"
    return f"not JSON: {error}" if isinstance(error, ValueError) else f"not an object with a text {field!r}: {error}"


def _line_number(unit: Unit, at: int) -> int:
    """Counted only for a message."""
    with _open(unit) as file:
        lines, left = 1, at
        while left and (block := file.read(min(left, UNIT_BYTES))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _stretches(unit: Unit) -> Iterator[Text]:
    """Cut at line ends, so that no character is cut; a line longer than a stretch stays whole."""
    held, size = [], 0
    for _, line in _lines(unit):
        held.append(line)
        size += len(line)
        if size >= STRETCH_BYTES:
            yield Text(b"".join(held), unit.path.name.encode(), ends=False)
            held, size = [], 0
    yield Text(b"".join(held), unit.path.name.encode(), ends=unit.last)
