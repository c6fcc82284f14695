"""From the probe's text to a node's facts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from micsctl.cluster.model import Node
from micsctl.errors import HealthError
from micsctl.topology import parse
from micsctl.topology.model import CpuDevices, Device, NodeFacts
from micsctl.topology.parse import ParseError, Section
from micsctl.topology.probe import GPU_COLUMNS


def node_facts(
    text: str,
    node: Node,
    *,
    clock_offset_seconds: float,
    cpu_devices: CpuDevices | None,
    network_nodes: tuple[str, ...],
) -> NodeFacts:
    """What `text`, printed by probe.COMMAND on `node`, says.

    cpu_devices   the devices of a CPU node; where given, GPUs are not looked at (several emulated nodes on one
                  machine would all claim the same ones)

    Raises HealthError where the node cannot train: no GPU, a GPU cut up by MIG, an answer that cannot be read.
    """
    try:
        of = parse.sections(text)
        devices, nvlinks = _cpu(cpu_devices) if cpu_devices else _gpus(of, node)
        return NodeFacts(
            index=node.index,
            instance_id=node.instance_id,
            hostname=_section(of, "hostname").text.strip(),
            private_ip=node.private_ip,
            interface=parse.interface_of(_section(of, "addresses").text, node.private_ip),
            devices=devices,
            nvlinks=nvlinks,
            efa_devices=_efa_devices(of),
            cpus=parse.count(_section(of, "cpus").text),
            memory_bytes=parse.memory_bytes(_section(of, "memory").text),
            clock_offset_seconds=clock_offset_seconds,
            versions=_versions(of, gpus=not cpu_devices),
            network_nodes=network_nodes,
        )
    except ParseError as error:
        raise HealthError(
            f"cannot read what {node.name} says about itself", str(error), next=f"micsctl ssh {node.index}"
        ) from None


def _cpu(cpu: CpuDevices) -> tuple[tuple[Device, ...], tuple[tuple[int, ...], ...]]:
    return tuple(Device(i, "CPU process", cpu.memory_bytes, None) for i in range(cpu.count)), ()


def _gpus(of: Mapping[str, Section], node: Node) -> tuple[tuple[Device, ...], tuple[tuple[int, ...], ...]]:
    rows = _gpu_rows(of, node)
    if cut := [row["index"] for row in rows if row["mig.mode.current"] == "Enabled"]:
        raise HealthError(
            f"MIG is on for GPU {', '.join(str(i) for i in cut)} of {node.name}",
            "a GPU that is cut into instances cannot be one device of a partition group",
            next=f"on the node: sudo nvidia-smi -mig 0   (micsctl ssh {node.index})",
        )
    matrix = _link_matrix(of, len(rows))
    numa = matrix.numa_nodes if matrix else (None,) * len(rows)
    devices = tuple(
        Device(i, row["name"] or "unknown GPU", _mebibytes(row["memory.total"]), numa[i]) for i, row in enumerate(rows)
    )
    return devices, matrix.nvlinks if matrix else ()


def _gpu_rows(of: Mapping[str, Section], node: Node) -> list[dict[str, str | None]]:
    section = _section(of, "gpus")
    try:
        rows = parse.csv_table(section.text) if section.exit_code == 0 else []
        says = section.text
        if rows and set(GPU_COLUMNS) - set(rows[0]):
            raise ParseError(section.text)
    except ParseError as error:
        rows, says = [], str(error)
    if not rows:
        raise HealthError(
            f"no GPU found on {node.name}",
            f"nvidia-smi says: {says.strip() or '(nothing)'}",
            next=f"replace the node or its image; to look: micsctl ssh {node.index}",
        )
    return rows


def _link_matrix(of: Mapping[str, Section], gpus: int) -> parse.LinkMatrix | None:
    """None where the driver gives no table: links and NUMA nodes are then unknown, which check.py reports."""
    section = _section(of, "links")
    if section.exit_code != 0:
        return None
    matrix = parse.link_matrix(section.text)
    if len(matrix.nvlinks) != gpus:
        raise ParseError(f"nvidia-smi lists {gpus} GPUs, its table of links {len(matrix.nvlinks)}")
    return matrix


def _mebibytes(text: str | None) -> int:
    return parse.count(text or "") << 20


def _efa_devices(of: Mapping[str, Section]) -> tuple[str, ...]:
    """libfabric's word, which is what NCCL gets; the kernel's where fi_info is not installed (127) or hangs (124)."""
    section = _section(of, "fi_info")
    if section.exit_code == 0:
        return parse.fi_info(section.text)
    if section.exit_code not in (124, 127):
        return ()
    return tuple(name for name in parse.rdma_devices(_section(of, "rdma").text) if parse.is_efa(name))


def _versions(of: Mapping[str, Section], *, gpus: bool) -> dict[str, str]:
    python = _section(of, "versions")
    driver = parse.csv_table(_section(of, "gpus").text)[0]["driver_version"] if gpus else None
    return {
        **parse.tool_versions(of),
        **(parse.python_versions(python.text) if python.exit_code == 0 else {}),
        **({"driver": driver} if driver else {}),
    }


def _section(of: Mapping[str, Section], name: str) -> Section:
    if name not in of:
        raise ParseError(f"the probe did not reach its section {name!r}")
    return of[name]
