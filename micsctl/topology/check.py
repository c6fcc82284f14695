"""What is wrong with a cluster before anything is launched on it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

from micsctl.topology.model import NodeFacts, Topology

_SKEW_SECONDS = 1.0

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    level   error: do not launch; warning: it works, slower or less safely
    node    index of the node, None where it concerns all
    next    the command to type, "" where there is none
    """

    level: Literal["error", "warning"]
    node: int | None
    text: str
    next: str = ""


def check(
    topology: Topology, *, nodes_expected: int, efa_devices_expected: int, devices_expected: int | None = None
) -> tuple[Finding, ...]:
    """Findings in node order.

    nodes_expected         as many as were brought up; one of them may have ended since
    efa_devices_expected   of the instance type, per node (0 where it has no EFA)
    devices_expected       GPUs of the instance type, per node; None = only that all nodes agree
    """
    return (
        *_missing(topology, nodes_expected),
        *_devices(topology, devices_expected),
        *_efa(topology, efa_devices_expected),
        *_links(topology),
        *_clocks(topology),
        *_versions(topology),
    )


def _missing(topology: Topology, expected: int) -> list[Finding]:
    there = len(topology.nodes)
    text = f"the cluster has {_count(there, 'node')} where {expected} are expected"
    return [Finding("error", None, text, "micsctl status")] if there < expected else []


def _devices(topology: Topology, expected: int | None) -> list[Finding]:
    usual = expected if expected is not None else _usual(topology, lambda node: len(node.devices))
    wrong = [
        Finding(
            "error",
            node.index,
            f"{_name(node)} has {_count(len(node.devices), 'device')} where {usual} are expected",
            f"micsctl ssh {node.index} nvidia-smi",
        )
        for node in topology.nodes
        if len(node.devices) != usual
    ]
    kind = _usual(topology, _kinds)
    mixed = [
        Finding("error", node.index, f"{_name(node)} has {_kinds(node)} where the others have {kind}")
        for node in topology.nodes
        if len(node.devices) == usual and _kinds(node) != kind
    ]
    return wrong + mixed


def _efa(topology: Topology, expected: int) -> list[Finding]:
    return [
        Finding(
            "error",
            node.index,
            f"{_name(node)} has {_count(len(node.efa_devices), 'EFA device')} where {expected} are expected: "
            "its network would run at a fraction of its speed",
            f"micsctl ssh {node.index} fi_info -p efa",
        )
        for node in topology.nodes
        if len(node.efa_devices) < expected
    ]


def _links(topology: Topology) -> list[Finding]:
    unknown = [
        Finding("warning", node.index, f"{_name(node)} does not say how its GPUs are linked")
        for node in topology.nodes
        if len(node.devices) > 1 and not node.nvlinks and any(other.nvlinks for other in topology.nodes)
    ]
    usual = _usual(topology, lambda node: node.nvlinks)
    fewer = [
        Finding(
            "error",
            node.index,
            f"{_name(node)} has other NVLinks between its GPUs than the other nodes",
            f"micsctl ssh {node.index} nvidia-smi topo -m",
        )
        for node in topology.nodes
        if node.nvlinks and usual and node.nvlinks != usual
    ]
    return unknown + fewer


def _clocks(topology: Topology) -> list[Finding]:
    middle = median(node.clock_offset_seconds for node in topology.nodes)
    text = f"this machine's clock is {_skew(-middle)} that of the nodes"
    laptop = [Finding("warning", None, text)] if abs(middle) > _SKEW_SECONDS else []
    return laptop + [
        Finding(
            "warning",
            node.index,
            f"the clock of {_name(node)} is {_skew(node.clock_offset_seconds - middle)} that of the other nodes",
            f"micsctl ssh {node.index} chronyc tracking",
        )
        for node in topology.nodes
        if abs(node.clock_offset_seconds - middle) > _SKEW_SECONDS
    ]


def _versions(topology: Topology) -> list[Finding]:
    names = sorted({name for node in topology.nodes for name in node.versions})
    found = []
    for name in names:
        nodes_with: dict[str, list[int]] = {}
        for node in topology.nodes:
            nodes_with.setdefault(node.versions.get(name, "none"), []).append(node.index)
        if len(nodes_with) > 1:
            spread = "; ".join(f"{version} on {_nodes(indices)}" for version, indices in nodes_with.items())
            found.append(Finding("warning", None, f"nodes differ in {name}: {spread}"))
    return found


def _usual(topology: Topology, of: Callable[[NodeFacts], V]) -> V:
    """The value that most nodes have; the earliest in rank order where several are equally common."""
    return Counter(of(node) for node in topology.nodes).most_common(1)[0][0]


def _kinds(node: NodeFacts) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(d.name for d in node.devices).items())


def _name(node: NodeFacts) -> str:
    return f"node {node.index} ({node.instance_id})"


def _nodes(indices: list[int]) -> str:
    return f"node{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _skew(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"
