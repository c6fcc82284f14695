from __future__ import annotations

from micsctl.topology.model import Device, NodeFacts

NV12 = tuple(tuple(0 if i == j else 12 for j in range(4)) for i in range(4))


def make_node(
    index: int,
    *,
    devices: int = 4,
    name: str = "A100",
    nvlinks: tuple[tuple[int, ...], ...] = NV12,
    efa: int = 4,
    clock: float = 0.0,
    versions: dict[str, str] | None = None,
    network_nodes: tuple[str, ...] = (),
) -> NodeFacts:
    return NodeFacts(
        index=index,
        instance_id=f"i-{index}",
        hostname=f"host{index}",
        private_ip=f"10.0.0.{index}",
        interface="ens32",
        devices=tuple(Device(i, name, 40 << 30, 0) for i in range(devices)),
        nvlinks=nvlinks,
        efa_devices=tuple(f"rdmap{i}s27" for i in range(efa)),
        cpus=96,
        memory_bytes=1 << 40,
        clock_offset_seconds=clock,
        versions=versions if versions is not None else {"torch": "2.13.0"},
        network_nodes=network_nodes,
    )
