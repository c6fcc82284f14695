"""Small texts of each kind that the tools print, written for these tests."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

# a recent driver: tabs, an empty cell before GPU NUMA ID
FOUR_NV12 = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV12\tNV12\tNV12\t0-23,48-71\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tNV12\tNV12\t0-23,48-71\t0\t\tN/A\n"
    "GPU2\tNV12\tNV12\t X \tNV12\t24-47,72-95\t1\t\tN/A\n"
    "GPU3\tNV12\tNV12\tNV12\t X \t24-47,72-95\t1\t\tN/A\n" + LEGEND
)

# blanks in place of tabs, as copied from a terminal; one bridged pair among three
BRIDGE = """
        GPU0    GPU1    GPU2    CPU Affinity    NUMA Affinity
GPU0     X      NV4     NODE    0-31            0
GPU1    NV4      X      NODE    0-31            0
GPU2    NODE    NODE     X      0-31            N/A
"""

# an old driver: no NUMA column, cards by device name, their rows end in tabs
OLD_WITH_NICS = (
    "\tGPU0\tGPU1\tmlx5_0\tmlx5_2\tCPU Affinity\n"
    "GPU0\t X \tNV1\tPIX\tSYS\t0-19\n"
    "GPU1\tNV1\t X \tPHB\tSOC\t0-19\n"
    "mlx5_0\tPIX\tPHB\t X \tSYS\t\n"
    "mlx5_2\tSYS\tSOC\tSYS\t X \t\n"
)

# cards by number, with their names in a legend of their own
NIC_LEGEND = (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tPHB\tSYS\t0-15\t1\t\tN/A\n"
    "GPU1\tPHB\t X \tSYS\t0-15\t1\t\tN/A\n"
    "NIC0\tSYS\tSYS\t X \t\t\t\t\n" + LEGEND + "\nNIC Legend:\n\n  NIC0: rocep49s0\n"
)

# a GPU in MIG mode is still one GPU; the header is underlined
MIG = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-19\t0\t\tN/A\n" + LEGEND

# `nvidia-smi topo -p2p r`: same shape, other meaning
P2P = """
        GPU0    GPU1
 GPU0   X       OK
 GPU1   OK      X

Legend:

  X    = Self
  OK   = Status Ok
"""

GPU_CSV = """index, name, memory.total [MiB], driver_version, mig.mode.current
0, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled
1, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled
2, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled
3, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, Disabled
"""

FI_INFO = """provider: efa
    fabric: EFA-fe80::1
    domain: rdmap16s27-rdm
    version: 111.20
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: EFA-fe80::1
    domain: rdmap16s27-dgrm
    version: 111.20
    type: FI_EP_DGRAM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa
    domain: rdmap32s27-rdm
    version: 111.20
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
"""

IBV_DEVICES = """    device                 node GUID
    ------              ----------------
    rdmap16s27          0000000000000000
    mlx5_0              98039b0300a2f1c4
"""

IP_ADDR = """1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
1: lo    inet6 ::1/128 scope host noprefixroute \\       valid_lft forever preferred_lft forever
2: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\       valid_lft forever
3: ens32    inet 10.77.0.11/16 metric 100 brd 10.77.255.255 scope global dynamic ens32\\       valid_lft 3000sec
3: ens32    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
4: eth0@if7    inet 10.77.0.1/16 scope global eth0\\       valid_lft forever preferred_lft forever
"""

MEMINFO = "MemTotal:       1176298496 kB\nMemFree:        1100000000 kB\n"

VERSIONS = '{"python": "3.11.9", "torch": "2.13.0+cu130", "nccl": "2.28.3"}'


def probe_output(**changes: tuple[str, int] | None) -> str:
    """What the probe prints on a healthy 4-GPU node; `name=(text, exit code)` changes a section, None leaves it out."""
    sections: dict[str, tuple[str, int] | None] = {
        "hostname": ("ip-10-77-0-11\n", 0),
        "kernel": ("6.8.0-1024-aws\n", 0),
        "cpus": ("96\n", 0),
        "memory": (MEMINFO, 0),
        "addresses": (IP_ADDR, 0),
        "gpus": (GPU_CSV, 0),
        "links": (FOUR_NV12, 0),
        "fi_info": (FI_INFO, 0),
        "fi_version": ("fi_info: 1.22.0amzn1.0\nlibfabric: 1.22.0amzn1.0\nlibfabric api: 1.22\n", 0),
        "rdma": (IBV_DEVICES, 0),
        "efa_version": ("# EFA installer version: 1.34.0\n", 0),
        "versions": (VERSIONS + "\n", 0),
        **changes,
    }
    present = {name: section for name, section in sections.items() if section}
    return "".join(f"\n@@ begin {name}\n{text}\n@@ end {code}\n" for name, (text, code) in present.items())
