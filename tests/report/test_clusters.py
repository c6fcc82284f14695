"""Tables of clusters and topologies."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from micsctl.cli.render import _print_rich
from micsctl.report import clusters
from micsctl.topology.model import Device, NodeFacts, Topology

A100 = tuple(Device(i, "NVIDIA A100-SXM4-40GB", 40 << 30, i // 4) for i in range(8))
ALL_TO_ALL = tuple(tuple(12 * (i != j) for j in range(8)) for i in range(8))


def node(index: int, devices: tuple[Device, ...], nvlinks: tuple[tuple[int, ...], ...]) -> NodeFacts:
    return NodeFacts(
        index=index,
        instance_id=f"i-0123456789abcdef{index}",
        hostname="h",
        private_ip=f"10.78.100.10{index}",
        interface="enp39s0",
        devices=devices,
        nvlinks=nvlinks,
        efa_devices=("rdmap0s6",) * 4,
        cpus=96,
        memory_bytes=1 << 40,
        clock_offset_seconds=0.003,
        versions={"torch": "2.13.0+cu130"},
        network_nodes=("nn-1", "nn-22", "nn-333"),
    )


@pytest.mark.parametrize(
    ("devices", "nvlinks"), [(A100, ALL_TO_ALL), ((Device(0, "CPU process", 54 << 20, None),), ())]
)
def test_a_topology_fits_a_terminal_of_100_columns(
    devices: tuple[Device, ...], nvlinks: tuple[tuple[int, ...], ...]
) -> None:
    screen = io.StringIO()
    for table in clusters.topology(Topology((node(0, devices, nvlinks), node(1, devices, nvlinks)))):
        _print_rich(Console(file=screen, width=100), table)
    shown = screen.getvalue()
    assert "…" not in shown
    for whole in ("10.78.100.101", "2.13.0+cu130", "nn-1 > n-22 > -333", f"{len(devices)} x {devices[0].name} with"):
        assert whole in shown
