"""How a long command tells what it does. The command line draws it; tests record it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    def phase(self, name: str) -> AbstractContextManager[None]:
        """One row with its elapsed time, from entry to exit; an exception that leaves the block marks it failed."""
        ...

    def note(self, text: str) -> None:
        """What the current phase waits for; replaces its last note."""
        ...
