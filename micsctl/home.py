"""Where micsctl keeps its files on the laptop."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from micsctl.errors import UsageError


@dataclass(frozen=True)
class ClusterFiles:
    """The laptop's folder of one cluster: its key, its host keys, its journal. Mode 0700."""

    folder: Path

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """Held by the command that changes the cluster (see `hold`). Beside the folder, which `down` removes."""
        return self.folder.with_name(f"{self.folder.name}.lock")


@dataclass(frozen=True)
class Home:
    """`MICSCTL_HOME`, or `$XDG_STATE_HOME/micsctl`, or `~/.local/state/micsctl`."""

    folder: Path

    @classmethod
    def find(cls) -> Home:
        if explicit := os.environ.get("MICSCTL_HOME"):
            return cls(Path(explicit).expanduser().absolute())
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return cls(Path(state) / "micsctl")

    @property
    def sandbox(self) -> Path:
        return self.folder / "sandbox"

    def cluster(self, provider: str, name: str) -> ClusterFiles:
        """Folder of the cluster `name`; providers are kept apart so that a sandbox never shadows a real cluster."""
        return ClusterFiles(self.folder / "clusters" / provider / name)


@contextmanager
def hold(lock: Path, what: str) -> Iterator[None]:
    """Keep others on this laptop from doing `what` meanwhile. Raises UsageError that names the process that has it.

    The lock ends with the process, however it ends; the file stays.
    """
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            why = f"process {file.read().strip() or 'unknown'} has {lock}"
            raise UsageError(f"another command is busy with {what}", why, next="wait for it, or end it") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
