"""One node as the rest of micsctl sees it: a place to run commands and put files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from micsctl.errors import MicsctlError


class HostError(MicsctlError):
    """A node could not be reached, or a command on it failed.

    transient  the same attempt may succeed a moment later (the port is not open yet, the connection broke)
    """

    def __init__(self, what: str, why: str = "", *, costs: str = "", next: str = "", transient: bool = False) -> None:
        super().__init__(what, why, costs=costs, next=next)
        self.transient = transient


class LoginError(HostError):
    """The node's host key is right, and it refuses the cluster's key. A booting node does so for some seconds."""


class HostKeyError(HostError):
    """The host key that a node shows is unknown or not the expected one. Never retried, never accepted."""


@dataclass(frozen=True)
class Result:
    """What a remote command answered."""

    exit_code: int
    stdout: str
    stderr: str


class Host(Protocol):
    """Paths that do not begin with / are relative to the login user's home on the node.

    Every method raises HostError (a MicsctlError that names the node) when the node cannot be reached or its key is
    unknown or changed. None of them asks for anything on a terminal.
    """

    @property
    def name(self) -> str:
        """For messages: "node 1 (i-0abc)"."""
        ...

    @property
    def index(self) -> int:
        """Of the node in the cluster."""
        ...

    def run(self, command: str, *, timeout_seconds: float = 60, check: bool = True) -> Result:
        """Run with bash. With `check`, an exit code other than 0 raises HostError with the last lines of stderr."""
        ...

    def stream(self, command: str, on_line: Callable[[str], None]) -> int:
        """Run, hand over stdout line by line as it comes, return the exit code. Ends when the command does."""
        ...

    def write(self, path: str, text: str, *, mode: int = 0o600) -> None:
        """Put a small text file, whole or not at all (temporary name, then rename); missing folders are made."""
        ...

    def read(self, path: str) -> str | None:
        """A small text file's content, None where it does not exist."""
        ...

    def send_folder(self, source: Path, target: str) -> None:
        """Make folder `target` hold exactly what `source` holds (caches and *.pyc left out)."""
        ...

    def close(self) -> None: ...
