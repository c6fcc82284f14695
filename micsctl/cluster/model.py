"""What `up` makes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Node:
    """One machine. `index` is its place in the launch (0 = head), kept for the cluster's life as a tag."""

    index: int
    instance_id: str
    state: str  # EC2's word: pending, running, shutting-down, terminated, ...
    private_ip: str
    public_ip: str | None  # the Elastic IP; the head has one, the others have none

    @property
    def name(self) -> str:
        return f"node {self.index} ({self.instance_id})"


@dataclass(frozen=True)
class Cluster:
    """The machines that AWS says exist under this name, in node order."""

    name: str
    provider: str
    region: str
    zone: str
    instance_type: str
    ssh_user: str
    ssh_port: int
    created_at: datetime
    ends_at: datetime  # of the TTL at `up`; the nodes' own `ends_at` files are the truth afterwards
    nodes: tuple[Node, ...]

    @property
    def head(self) -> Node:
        return self.nodes[0]
