"""The contract between the emulated EC2 and whatever runs its instances as real SSH hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HostRequest:
    """One instance to start."""

    instance_id: str
    private_ip: str
    hostname: str
    public_key: str  # OpenSSH form, for the login user's authorized_keys
    user_data: bytes
    instance_type: str


class HostEnded(Protocol):
    def __call__(self, instance_id: str) -> None: ...


class NodeHosts(Protocol):
    """Starts and ends hosts. Implemented by netns.py (root, Linux), process.py (any user) and fake.py (no hosts)."""

    level: str  # "netns", "process", "none"
    ssh_user: str | None  # None = the one that the cluster asks for
    ssh_port: int
    vpc_cidr: str

    def start(self, requests: Sequence[HostRequest], on_running: Callable[[str], None], on_ended: HostEnded) -> None:
        """Begin to boot; returns at once. Calls back from another thread, once per instance and event."""
        ...

    def stop(self, instance_ids: Sequence[str]) -> None:
        """End hosts at once; unknown or ended ones are no error."""
        ...

    def console(self, instance_id: str) -> str:
        """Everything the instance has written to its console; kept after it ends."""
        ...

    def ssh_ready(self, instance_id: str) -> bool: ...

    def route(self, public_ip: str, instance_id: str | None) -> None:
        """An Elastic IP now leads to this instance (None: nowhere)."""
        ...

    def close(self) -> None:
        """End everything. The same happens when this process dies, however it dies."""
        ...
