"""Where micsctl keeps its files on the laptop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


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
