"""Bytes that leave a node, for every scheme. Pure, standard library only.

All figures are bytes sent by one node, over node-ordered rings (as NCCL's and gloo's are), payload only. Source of the
volumes: a ring over g ranks sends (g-1)/g of the message per rank for a gather or a reduce-scatter and twice that for
an all-reduce (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005); which
of these cross nodes follows from the rank grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from mics.strategies import Reshard
from mics.topology import Group, RankGrid


@dataclass(frozen=True)
class Traffic:
    """Bytes sent per node per optimizer step, by stage."""

    gather: float
    reduce_scatter: float  # hop 1
    hop2: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce_scatter + self.hop2


def crosses_node(rank: int, group: Group, devices_per_node: int) -> bool:
    """Whether `rank`'s send in a ring over `group` (to the next member) leaves its node."""
    following = group[(group.index(rank) + 1) % len(group)]
    return following // devices_per_node != rank // devices_per_node


def one_pass(grid: RankGrid, message_bytes: float) -> float:
    """Bytes per node of one gather or one reduce-scatter of `message_bytes` over every partition group.

    Flat ring (p-1)/p M per partition group; in two stages each of the node's devices takes its part across:
    (p-k)/p M. Zero where the partition group fits in a node.
    """
    p, k = grid.partition_size, grid.devices_per_node
    if p <= k:
        return 0.0
    return message_bytes * ((p - k) / p if grid.hierarchical else (p - 1) / p)


def hop2(grid: RankGrid, message_bytes: float) -> float:
    """Bytes per node of the all-reduce over the replication groups: 2 (r-1)/r M min(k, p)/p, if it crosses nodes."""
    k, p, r = grid.devices_per_node, grid.partition_size, grid.replicas
    if r == 1 or grid.world_size <= k:
        return 0.0
    # p <= k: k devices of a node hold k/p replicas of each shard; a node-ordered ring leaves the node once per shard.
    return 2 * (r - 1) / r * min(k, p) / p * message_bytes


def gathered(grid: RankGrid, *, block_bytes: float, root_bytes: float, micro_steps: int, reshard: Reshard) -> float:
    """Bytes per node per optimizer step of the gathers.

    Each block is gathered for the forward pass and again for the backward pass: with True across nodes, with a number
    of devices from the copy inside the node, otherwise not at all. The root's own weights stay until its backward.
    """
    passes_of_blocks = 2 if reshard is True else 1
    times = 1 if reshard == "step" else micro_steps
    return times * (passes_of_blocks * one_pass(grid, block_bytes) + one_pass(grid, root_bytes))


def per_step(
    grid: RankGrid,
    *,
    block_bytes: float,
    root_bytes: float,
    block_gradient_bytes: float,
    root_gradient_bytes: float,
    micro_steps: int,
    reshard: Reshard = True,
) -> Traffic:
    """Bytes per node per optimizer step of the MiCS schedule.

    It is also ZeRO-3 with p = n, ZeRO-2 with p = n and reshard "step", and DDP with p = 1.

    block_bytes, root_bytes   gathered weights of all blocks and of the root, in the dtype of the gather
    *_gradient_bytes          the trainable ones of these parameters, in the dtype of the reduction
    reshard                   how long gathered weights live (`mics.strategies`)
    """
    gradients = block_gradient_bytes + root_gradient_bytes
    return Traffic(
        gather=gathered(grid, block_bytes=block_bytes, root_bytes=root_bytes, micro_steps=micro_steps, reshard=reshard),
        reduce_scatter=micro_steps * one_pass(grid, gradients),
        hop2=hop2(grid, gradients),
    )
