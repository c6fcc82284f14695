"""What is really there: the answer of the probe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU, or on a CPU node one worker process."""

    index: int
    name: str
    memory_bytes: int
    numa_node: int | None  # None = unknown

    @property
    def on_cpu(self) -> bool:
        """Whether it is a worker process and no GPU (topology/facts.py names both)."""
        return self.name.upper().startswith("CPU")


@dataclass(frozen=True)
class CpuDevices:
    """What stands for the GPUs of a node that has none: so many worker processes, each with an emulated memory."""

    count: int
    memory_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """One node as its own commands describe it."""

    index: int  # of the node in the cluster
    instance_id: str
    hostname: str
    private_ip: str
    interface: str  # the one that carries private_ip; "lo" where nodes share a machine's loopback
    devices: tuple[Device, ...]
    nvlinks: tuple[tuple[int, ...], ...]  # nvlinks[i][j] = bonded links between devices i and j; () = none known
    efa_devices: tuple[str, ...]
    cpus: int
    memory_bytes: int
    clock_offset_seconds: float  # node minus laptop, corrected by half the round trip
    versions: dict[str, str]  # kernel, python, torch, and where they exist driver, nccl, libfabric, efa
    network_nodes: tuple[str, ...]  # AWS's switch layers, coarsest first; () where unknown


@dataclass(frozen=True)
class Topology:
    """All nodes, in the order in which ranks are given out (see topology/order.py)."""

    nodes: tuple[NodeFacts, ...]

    @property
    def devices_per_node(self) -> int:
        """Raises ValueError where nodes differ."""
        counts = {len(node.devices) for node in self.nodes}
        if len(counts) != 1:
            raise ValueError(f"nodes have different numbers of devices: {sorted(counts)}")
        return counts.pop()

    @property
    def device_memory_bytes(self) -> int:
        """The smallest memory of any device: what a plan may count on."""
        return min(device.memory_bytes for node in self.nodes for device in node.devices)
