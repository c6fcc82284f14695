"""The rank grid: which ranks form which group, as integer arithmetic. Pure, standard library only.

n = world size, k = devices per node, p = partition size. Global ranks are node-major: rank = node * k + local rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Group = tuple[int, ...]


@dataclass(frozen=True)
class RankGrid:
    """n ranks on nodes of k devices, cut into partition groups of p.

    hierarchical  two-stage collectives inside a partition group that spans nodes. Only then is the order inside a
                  partition group changed: the node becomes the fast axis (2 nodes x 2 devices: 0, 2, 1, 3), so that
                  the gather across nodes fills one contiguous column of the output. A flat ring on that order would
                  cross nodes at every hop, so flat strategies keep the natural order.

    Raises ValueError where p does not divide n, or neither fits in a node nor fills whole nodes.
    """

    world_size: int
    devices_per_node: int
    partition_size: int
    hierarchical: bool = False

    def __post_init__(self) -> None:
        n, k, p = self.world_size, self.devices_per_node, self.partition_size
        if min(n, k, p) < 1:
            raise ValueError(f"world size {n}, devices per node {k} and partition size {p} must be at least 1")
        if n % k:
            raise ValueError(f"world size {n} is not a whole number of nodes of {k} devices")
        if n % p:
            raise ValueError(f"partition size {p} does not divide the world size {n}; it may be {fitting(n, k)}")
        if p % k and k % p:
            raise ValueError(
                f"partition size {p} neither fits in a node nor fills whole nodes of {k} devices; "
                f"it may be {fitting(n, k)}"
            )
        if self.hierarchical and p <= k:
            raise ValueError(f"hierarchical collectives need a partition group that spans nodes: {p} <= {k}")

    @property
    def nodes_per_partition(self) -> int:
        return max(1, self.partition_size // self.devices_per_node)

    @property
    def devices_inside(self) -> int:
        """Devices that one partition group has on one node."""
        return self.partition_size // self.nodes_per_partition

    @property
    def replicas(self) -> int:
        return self.world_size // self.partition_size

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def partition_groups(self) -> tuple[Group, ...]:
        """One group per replica, each in the order of its process group (= order of the shards)."""
        p, inside = self.partition_size, self.devices_inside
        natural = [tuple(range(start, start + p)) for start in range(0, self.world_size, p)]
        if not self.hierarchical:
            return tuple(natural)
        return tuple(tuple(r for local in range(inside) for r in group[local::inside]) for group in natural)

    def replication_groups(self) -> tuple[Group, ...]:
        """One group per shard: the ranks that hold that shard, one from each partition group."""
        return tuple(zip(*self.partition_groups(), strict=True))

    def across_groups(self) -> tuple[Group, ...]:
        """Hierarchical only: ranks with one local rank, one on each node of a partition group."""
        self._needs_hierarchy()
        width = self.nodes_per_partition
        return tuple(group[i : i + width] for group in self.partition_groups() for i in range(0, len(group), width))

    def inside_groups(self) -> tuple[Group, ...]:
        """Hierarchical only: the ranks of a partition group on one node, by local rank."""
        self._needs_hierarchy()
        width = self.nodes_per_partition
        return tuple(group[i::width] for group in self.partition_groups() for i in range(width))

    def sharing_groups(self, devices: int) -> tuple[Group, ...]:
        """Neighbours on a node, `devices` at a time. Where that number divides `devices_inside`, each of these groups
        lies inside one partition group, and can keep a copy of its weights."""
        return tuple(tuple(range(start, start + devices)) for start in range(0, self.world_size, devices))

    def _needs_hierarchy(self) -> None:
        if not self.hierarchical:
            raise ValueError("a flat rank grid has no stages")


def partition_sizes(world_size: int, devices_per_node: int) -> tuple[int, ...]:
    """Every p that divides n and fits in or fills nodes, ascending."""
    n, k = world_size, devices_per_node
    return tuple(p for p in range(1, n + 1) if n % p == 0 and (p % k == 0 or k % p == 0))


def fitting(world_size: int, devices_per_node: int) -> str:
    return ", ".join(map(str, partition_sizes(world_size, devices_per_node)))


def group_of(rank: int, groups: Iterable[Group]) -> Group:
    return next(group for group in groups if rank in group)
