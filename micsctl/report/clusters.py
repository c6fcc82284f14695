"""Cluster and topology as tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from micsctl.cluster.model import Cluster
from micsctl.duration import format_duration
from micsctl.report.table import Table, format_memory, format_seconds
from micsctl.topology.model import Device, NodeFacts, Topology

if TYPE_CHECKING:
    from micsctl.cluster.status import Status
    from micsctl.spec import Spec
    from micsctl.topology.check import Finding


class SandboxFacts(Protocol):
    """What a table says about the sandbox."""

    @property
    def level(self) -> str: ...
    @property
    def link_mbps(self) -> int | None: ...
    @property
    def shaped(self) -> bool: ...


def intent(spec: Spec, sandbox: SandboxFacts | None, planned: str) -> Table:
    """What `up` is about to make; `planned` is the partition size with its reason."""
    cluster = spec.cluster
    where = cluster.region if spec.provider == "aws" else "sandbox on this machine"
    if sandbox:
        where += f", level {sandbox.level}, {links(sandbox)}"
    rows = (
        ("cluster", spec.name),
        ("nodes", f"{cluster.nodes} x {cluster.type}"),
        ("where", where),
        ("zones", ", ".join(cluster.zones) or "any that offers the type, one for all nodes"),
        ("reached by", "Elastic IP on node 0, the others through it"),
        ("ends itself", f"{format_duration(cluster.ttl)} after the start"),
        ("partition size", planned),
    )
    return Table("", ("", " "), rows)


def links(sandbox: SandboxFacts) -> str:
    return f"links shaped to {sandbox.link_mbps} Mbit/s" if sandbox.shaped else "links not shaped"


def nodes(cluster: Cluster) -> Table:
    rows = tuple((str(n.index), n.instance_id, n.state, n.private_ip, n.public_ip or "-") for n in cluster.nodes)
    title = f"cluster {cluster.name}: {len(cluster.nodes)} x {cluster.instance_type} in {cluster.zone}"
    return Table(title, ("node", "instance", "state", "private address", "public address"), rows)


def next_lines(cluster: Cluster) -> str:
    name = "" if cluster.name == "demo" else f" -n {cluster.name}"
    lines = [f"micsctl {word}{name}" for word in ("topology", "plan", "launch", "logs -f", "ssh", "down")]
    return "next: " + "   ".join(lines) + f"\nends itself at {cluster.ends_at:%Y-%m-%d %H:%M} UTC"


def ends_line(ends_at: datetime, left: timedelta) -> str:
    return f"ends itself at {ends_at:%Y-%m-%d %H:%M} UTC, in {format_seconds(max(0.0, left.total_seconds()))}"


def status_lines(name: str, status: Status) -> str:
    """What is below the table of nodes: when they end, which have ended, and what else exists."""
    cluster = status.cluster
    # status asks no node, so it does not know what `extend` told them
    lines = []
    if cluster:
        lines.append(f"{ends_line(cluster.ends_at, timedelta(seconds=status.seconds_left))}; later if it was extended")
    lines += [f"{node.name} is gone ({node.state})" for node in status.ended]
    if not cluster and status.resources:
        left = ", ".join(f"{resource.kind} {resource.id}" for resource in status.resources)
        lines.append(f"no cluster {name!r}, but this is left of it: {left}")
        lines.append("next: micsctl down")
    elif not cluster:
        lines.append(f"no cluster {name!r}; nothing costs money under this name")
    return "\n".join(lines)


def finding_lines(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{f.level}: {f.text}{f'; next: {f.next}' if f.next else ''}" for f in findings)


def topology(found: Topology) -> tuple[Table, Table]:
    """Nodes with their devices, and how the devices are linked."""
    rows = tuple(_node_row(rank, node) for rank, node in enumerate(found.nodes))
    columns = ("order", "node", "address", "interface", "devices", "EFA", "clock", "torch", "switches")
    caption = "switches: the last four characters of each network node, coarsest first (--json has them whole)"
    right = frozenset({"devices", "EFA", "clock"})
    machines = Table("nodes, in the order in which ranks are given out", columns, rows, right, caption)
    return machines, _link_table(found.nodes[0])


def _node_row(rank: int, node: NodeFacts) -> tuple[str, ...]:
    return (
        str(rank),
        str(node.index),
        node.private_ip,
        node.interface,
        str(len(node.devices)),
        str(len(node.efa_devices)),
        f"{node.clock_offset_seconds * 1000:+.0f} ms",
        node.versions.get("torch", "-"),
        " > ".join(switch[-4:] for switch in node.network_nodes) or "-",
    )


def _link_table(node: NodeFacts) -> Table:
    """NVLinks between the devices of one node, where they are known; a CPU node's devices are processes."""
    first = node.devices[0]
    title = f"devices of a node, {len(node.devices)} x {first.name} with {format_memory(first.memory_bytes)} each"
    if not node.nvlinks:
        on_cpu = all(device.on_cpu for device in node.devices)
        joined = "worker processes, joined by its loopback" if on_cpu else "how they are linked is unknown"
        devices = tuple((str(device.index), _numa(device)) for device in node.devices)
        return Table(f"{title}: {joined}", ("device", "NUMA"), devices)
    columns = ("device", "NUMA", *(str(device.index) for device in node.devices))
    rows = tuple(
        (
            str(device.index),
            _numa(device),
            *("." if i == j else f"NV{n}" if n else "-" for j, n in enumerate(node.nvlinks[i])),
        )
        for i, device in enumerate(node.devices)
    )
    return Table(f"{title}, and the links between them", columns, rows)


def _numa(device: Device) -> str:
    return "-" if device.numa_node is None else str(device.numa_node)
