"""metrics.jsonl of a program that measures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mics.errors import RunFolderError


class Lines:
    """metrics.jsonl and a line for the reader, on rank 0; elsewhere nothing. Counts the lines.

    readable  a record as one line for people

    Raises RunFolderError where the file cannot be written.
    """

    def __init__(self, path: Path, readable: Callable[[Mapping[str, Any]], str], *, writes: bool) -> None:
        self._path, self._readable, self._writes, self.count = path, readable, writes, 0
        self._put("", "w")

    def write(self, record: Mapping[str, Any]) -> None:
        self.count += 1
        self._put(json.dumps({"step": self.count, **record}) + "\n", "a")
        if self._writes:
            sys.stdout.write(f"{self._readable(record)}\n")
            sys.stdout.flush()

    def _put(self, text: str, mode: str) -> None:
        if not self._writes:
            return
        try:
            with self._path.open(mode) as file:
                file.write(text)
        except OSError as error:
            raise RunFolderError(f"{self._path} cannot be written: {error.strerror}") from error
