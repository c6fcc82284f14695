"""What a plan must know about the machines: from a table before they exist, from the topology afterwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from micsctl.errors import HealthError, UsageError
from micsctl.planner.model import Machines

if TYPE_CHECKING:
    from micsctl.spec import Spec
    from micsctl.topology.model import Topology

_NO_BF16 = frozenset({"K80", "M60", "P4", "P40", "P100", "V100", "T4", "T4G"})  # made before Ampere


@dataclass(frozen=True)
class InstanceType:
    """The devices of one machine, as AWS describes its accelerated instance types."""

    devices: int
    device_memory_bytes: int
    device: str

    @property
    def bf16(self) -> bool:
        return has_bf16(self.device)


KNOWN: Mapping[str, InstanceType] = {
    "p3dn.24xlarge": InstanceType(8, 32 << 30, "V100"),
    "p4d.24xlarge": InstanceType(8, 40 << 30, "A100"),
    "p4de.24xlarge": InstanceType(8, 80 << 30, "A100"),
    "p5.48xlarge": InstanceType(8, 80 << 30, "H100"),
    "p5e.48xlarge": InstanceType(8, 141 << 30, "H200"),
    "p5en.48xlarge": InstanceType(8, 141 << 30, "H200"),
    "p6-b200.48xlarge": InstanceType(8, 179 << 30, "B200"),
    "g5.48xlarge": InstanceType(8, 22 << 30, "A10G"),
}


def has_bf16(device: str) -> bool:
    """Whether the device computes in bf16, by its name ("V100", "Tesla V100-SXM2-32GB", "cpu").

    False for GPUs older than Ampere, which have fp16, and for CPUs, where fp32 is the faster choice.
    """
    words = device.upper().replace("-", " ").split()
    return words[:1] != ["CPU"] and _NO_BF16.isdisjoint(words)


def machines_of(spec: Spec) -> Machines:
    """The machines that `up` would make. Raises UsageError for an instance type that is not in the table."""
    if spec.provider == "sandbox":
        sandbox = spec.sandbox
        return Machines(spec.cluster.nodes, sandbox.devices_per_node, int(sandbox.device_memory), "cpu", bf16=False)
    known = KNOWN.get(spec.cluster.type)
    if known is None:
        raise UsageError(
            f"cannot plan for {spec.cluster.type}",
            f"its devices are not known before it runs; known types: {', '.join(KNOWN)}",
            next="set cluster.type to one of them",
        )
    return Machines(spec.cluster.nodes, known.devices, known.device_memory_bytes, known.device, known.bf16)


def machines_from(topology: Topology) -> Machines:
    """The machines that are there: the smallest memory of any device; bf16 where every device has it.

    Raises HealthError where nodes have different numbers of devices.
    """
    try:
        devices_per_node = topology.devices_per_node
    except ValueError as error:
        raise HealthError("cannot plan for these nodes", str(error), next="micsctl topology") from None
    devices = [device for node in topology.nodes for device in node.devices]
    names = list(dict.fromkeys(device.name for device in devices))
    return Machines(
        nodes=len(topology.nodes),
        devices_per_node=devices_per_node,
        device_memory_bytes=topology.device_memory_bytes,
        device="cpu" if all(device.on_cpu for device in devices) else " and ".join(names),
        bf16=all(map(has_bf16, names)),
    )
