from __future__ import annotations

from dataclasses import replace

import pytest

from micsctl.cluster.model import Node
from micsctl.errors import HealthError
from micsctl.topology.facts import node_facts
from micsctl.topology.model import CpuDevices, NodeFacts

from . import samples

NODE = Node(2, "i-0abc", "running", "10.77.0.11", None)


def facts(cpu: CpuDevices | None = None, node: Node = NODE, **changes: tuple[str, int] | None) -> NodeFacts:
    return node_facts(
        samples.probe_output(**changes),
        node,
        clock_offset_seconds=0.25,
        cpu_devices=cpu,
        network_nodes=("nn-1", "nn-2"),
    )


def test_a_gpu_node() -> None:
    found = facts()
    assert (found.index, found.instance_id, found.hostname) == (2, "i-0abc", "ip-10-77-0-11")
    assert (found.private_ip, found.interface) == ("10.77.0.11", "ens32")
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert {device.name for device in found.devices} == {"NVIDIA A100-SXM4-40GB"}
    assert {device.memory_bytes for device in found.devices} == {40960 << 20}
    assert [device.numa_node for device in found.devices] == [0, 0, 1, 1]
    assert found.nvlinks[0] == (0, 12, 12, 12)
    assert found.efa_devices == ("rdmap16s27", "rdmap32s27")
    assert (found.cpus, found.memory_bytes) == (96, 1176298496 << 10)
    assert found.clock_offset_seconds == 0.25
    assert found.network_nodes == ("nn-1", "nn-2")
    assert found.versions == {
        "kernel": "6.8.0-1024-aws",
        "libfabric": "1.22.0amzn1.0",
        "efa": "1.34.0",
        "python": "3.11.9",
        "torch": "2.13.0+cu130",
        "nccl": "2.28.3",
        "driver": "550.54.15",
    }


MISSING = ("bash: line 1: nvidia-smi: command not found", 127)


def test_a_cpu_node_gets_the_devices_of_its_caller() -> None:
    found = facts(CpuDevices(2, 54 << 20), gpus=MISSING, links=MISSING, fi_info=("", 127), rdma=("", 2))
    assert [(device.index, device.memory_bytes, device.numa_node) for device in found.devices] == [
        (0, 54 << 20, None),
        (1, 54 << 20, None),
    ]
    assert found.nvlinks == ()
    assert found.efa_devices == ()


def test_emulated_nodes_do_not_all_claim_the_machines_own_gpus() -> None:
    assert [device.name for device in facts(CpuDevices(2, 1)).devices] == ["CPU process"] * 2


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (MISSING, "command not found"),
        (("No devices were found\n", 0), "No devices were found"),
        (
            ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n", 18),
            "580.173",
        ),
        (("", 124), "nothing"),
        (("name\nTesla\n", 0), "Tesla"),
    ],
)
def test_no_gpu_is_said_in_the_drivers_own_words(section: tuple[str, int], says: str) -> None:
    with pytest.raises(HealthError, match=r"no GPU found on node 2 \(i-0abc\)") as caught:
        facts(gpus=section)
    assert "nvidia-smi says: " in caught.value.why
    assert says in caught.value.why


def test_mig_is_refused() -> None:
    with pytest.raises(HealthError, match=r"MIG is on for GPU 1 of node 2"):
        facts(
            gpus=(
                samples.GPU_CSV.replace(
                    "1, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled", "1, A100, 40960, 550, Enabled"
                ),
                0,
            )
        )


def test_links_may_be_unknown_but_not_contradict() -> None:
    found = facts(links=("not supported", 255))
    assert found.nvlinks == ()
    assert [device.numa_node for device in found.devices] == [None] * 4
    with pytest.raises(HealthError, match="node 2") as caught:
        facts(links=(samples.BRIDGE, 0))
    assert "4 GPUs" in caught.value.why


def test_efa_devices_come_from_the_kernel_where_libfabric_is_missing() -> None:
    missing = ("bash: fi_info: command not found", 127)
    assert facts(fi_info=missing).efa_devices == ("rdmap16s27",)
    assert facts(fi_info=missing, rdma=("ibv_devices: command not found\nefa_0\nefa_1\n", 0)).efa_devices == (
        "efa_0",
        "efa_1",
    )
    assert facts(fi_info=("fi_getinfo: -61 (No data available)", 61)).efa_devices == ()


def test_loopback_addresses() -> None:
    assert facts(node=replace(NODE, private_ip="127.77.1.2")).interface == "lo"


def test_an_unreadable_answer_names_the_node() -> None:
    for changes in ({"cpus": ("many", 0)}, {"addresses": None}, {"memory": ("", 1)}):
        with pytest.raises(HealthError, match=r"cannot read what node 2 \(i-0abc\) says"):
            facts(**changes)
