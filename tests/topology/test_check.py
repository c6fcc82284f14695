from __future__ import annotations

from micsctl.topology.check import check
from micsctl.topology.model import NodeFacts, Topology

from .conftest import NV12, make_node


def found(
    *nodes: NodeFacts, expected: int = 1, efa: int = 4, devices: int | None = None
) -> list[tuple[str, int | None, str]]:
    findings = check(Topology(nodes), nodes_expected=expected, efa_devices_expected=efa, devices_expected=devices)
    return [(finding.level, finding.node, finding.text) for finding in findings]


def test_a_healthy_cluster() -> None:
    assert found(*(make_node(i) for i in range(4)), devices=4) == []
    assert found(make_node(0, nvlinks=(), efa=0), efa=0) == []


def test_a_cluster_that_has_lost_a_node_is_not_launched_on() -> None:
    ((level, node, text),) = found(make_node(0), make_node(2), expected=3)
    assert (level, node) == ("error", None)
    assert "has 2 nodes where 3 are expected" in text
    assert found(make_node(0), make_node(1), expected=1) == []


def test_missing_efa_devices() -> None:
    ((level, node, text),) = found(make_node(0), make_node(1, efa=1))
    assert (level, node) == ("error", 1)
    assert "node 1 (i-1) has 1 EFA device where 4 are expected" in text
    assert "no EFA devices" in found(make_node(0, efa=0))[0][2]


def test_device_counts() -> None:
    ((level, node, text),) = found(make_node(0), make_node(1), make_node(2, devices=3))[:1]
    assert (level, node) == ("error", 2)
    assert "3 devices where 4 are expected" in text
    assert [node for _, node, _ in found(make_node(0), make_node(1), devices=8)] == [0, 1]


def test_mixed_gpus() -> None:
    ((level, node, text),) = found(make_node(0), make_node(1), make_node(2, name="V100"))
    assert (level, node) == ("error", 2)
    assert "4 x V100 where the others have 4 x A100" in text


def test_a_lost_nvlink() -> None:
    broken = tuple(tuple(6 if {i, j} == {0, 1} else links for j, links in enumerate(row)) for i, row in enumerate(NV12))
    ((level, node, _),) = found(make_node(0, nvlinks=broken), make_node(1), make_node(2))
    assert (level, node) == ("error", 0)
    ((level, node, _),) = found(make_node(0), make_node(1, nvlinks=()))
    assert (level, node) == ("warning", 1)


def test_clocks() -> None:
    assert found(*(make_node(i, clock=0.9) for i in range(3))) == []
    ((level, node, text),) = found(make_node(0), make_node(1, clock=-2.5), make_node(2))
    assert (level, node) == ("warning", 1)
    assert "2.5 s behind that of the other nodes" in text
    ((level, node, text),) = found(*(make_node(i, clock=-40.0) for i in range(3)))
    assert (level, node) == ("warning", None)
    assert "this machine's clock is 40.0 s ahead of that of the nodes" in text


def test_versions() -> None:
    ((level, node, text),) = found(make_node(0), make_node(1, versions={"torch": "2.12.0"}), make_node(2))
    assert (level, node) == ("warning", None)
    assert text == "nodes differ in torch: 2.13.0 on nodes 0, 2; 2.12.0 on node 1"
    assert "none on node 1" in found(make_node(0), make_node(1, versions={}))[0][2]
