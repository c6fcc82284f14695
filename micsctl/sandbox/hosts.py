"""The contract between the emulated EC2 and whatever runs its instances as real SSH hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class HostsSettings:
    """What NetnsHosts, ProcessHosts and FakeHosts are made from: `ProcessHosts(settings)`."""

    sandbox_id: (
        str  # 8 hex digits, of the sandbox folder; every process carries it as MICSCTL_SANDBOX=<id> in its environment
    )
    folder: Path  # exists, mode 0700, empty; the hosts' own, removed by the server after `close`
    shared_folder: Path  # exists; stands for FSx: /fsx, or MICS_SHARED at process level
    ssh_user: str  # login user of the nodes (netns level)
    link_mbps: int | None  # rate of each node's link, None = not shaped (process level: never shaped)
    metadata_url: str  # process level: a node's AWS_EC2_METADATA_SERVICE_ENDPOINT is f"{metadata_url}/{instance_id}"
    s3_url: str  # process level: a node's AWS_ENDPOINT_URL_S3; the netns level has an address of its own for it


@dataclass(frozen=True)
class HostRequest:
    """One instance to start."""

    instance_id: str
    private_ip: str
    hostname: str
    public_key: str  # OpenSSH form, for the login user's authorized_keys
    user_data: bytes
    subnet_cidr: str = ""  # of the primary interface, for the node's route (netns level)
    region: str = "us-east-1"  # a node's AWS_DEFAULT_REGION


class HostEnded(Protocol):
    def __call__(self, instance_id: str) -> None: ...


class NodeHosts(Protocol):
    """Starts and ends hosts. Implemented by netns.py (root, Linux), process.py (any user) and fake.py (no hosts)."""

    level: str  # "netns", "process", "none"
    ssh_user: str | None  # None = the one that the cluster asks for
    ssh_port: int
    vpc_cidr: str  # of the default VPC. A loopback one: all private addresses come from it, whatever the subnet
    public_cidr: str  # Elastic IPs come from it, lowest first
    caller_cidr: str  # where the laptop's connections seem to come from

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
