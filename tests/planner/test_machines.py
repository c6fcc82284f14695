from __future__ import annotations

import pytest

from micsctl.errors import ExitCode, HealthError, UsageError
from micsctl.planner.machines import KNOWN, has_bf16, machines_from, machines_of
from micsctl.planner.model import Machines
from micsctl.spec import Spec, parse
from micsctl.topology.model import Device, NodeFacts, Topology


def node(*devices: Device) -> NodeFacts:
    return NodeFacts(
        index=0,
        instance_id="i-0",
        hostname="a",
        private_ip="10.0.0.1",
        interface="eth0",
        devices=devices,
        nvlinks=(),
        efa_devices=(),
        cpus=8,
        memory_bytes=1 << 35,
        clock_offset_seconds=0.0,
        versions={},
        network_nodes=(),
    )


def gpu(name: str, memory_bytes: int = 40 << 30) -> Device:
    return Device(0, name, memory_bytes, None)


def test_the_sandbox_has_the_devices_of_its_section() -> None:
    spec = parse("sandbox: {devices_per_node: 4, device_memory: 1GiB}\ncluster: {nodes: 3}")
    assert machines_of(spec) == Machines(3, 4, 1 << 30, "cpu", bf16=False)


def test_aws_has_the_devices_of_its_type() -> None:
    spec = parse("provider: aws\ncluster: {type: p4d.24xlarge, nodes: 2}")
    assert machines_of(spec) == Machines(2, 8, 40 << 30, "A100", bf16=True)
    assert machines_of(spec).world_size == 16


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        machines_of(parse("provider: aws\ncluster: {type: m5.large}"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "m5.large" in caught.value.what
    assert all(name in caught.value.why for name in KNOWN)


def test_only_volta_lacks_bf16() -> None:
    assert [name for name, known in KNOWN.items() if not known.bf16] == ["p3dn.24xlarge"]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A10G", True),
        ("Tesla V100-SXM2-32GB", False),
        ("Tesla T4", False),
        ("cpu", False),
        ("CPU process", False),
    ],
)
def test_bf16_by_the_name_that_nvidia_smi_prints(device: str, expected: bool) -> None:
    assert has_bf16(device) is expected


def test_what_is_there_counts_with_the_smallest_memory() -> None:
    topology = Topology((node(gpu("NVIDIA A100"), gpu("NVIDIA A100", 39 << 30)), node(gpu("NVIDIA A100"), gpu("A100"))))
    assert machines_from(topology) == Machines(2, 2, 39 << 30, "NVIDIA A100 and A100", bf16=True)


def test_one_old_device_takes_bf16_from_all() -> None:
    assert not machines_from(Topology((node(gpu("NVIDIA A100"), gpu("Tesla V100")),))).bf16


def test_the_sandbox_seen_from_its_topology_is_what_the_spec_said() -> None:
    spec = Spec()
    emulated = gpu("CPU process", int(spec.sandbox.device_memory))
    topology = Topology((node(*[emulated] * spec.sandbox.devices_per_node),) * spec.cluster.nodes)
    assert machines_from(topology) == machines_of(spec)


def test_nodes_that_differ_are_a_health_error() -> None:
    with pytest.raises(HealthError, match="cannot plan"):
        machines_from(Topology((node(gpu("A100")), node(gpu("A100"), gpu("A100")))))
