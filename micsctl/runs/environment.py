"""Environment of the ranks on one node. Pure.

For EFA we set nothing of FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, NCCL_PROTO or NCCL_ALGO: aws-ofi-nccl >= 1.7 with
libfabric >= 1.18 chooses them, and a wrong value disables the fast path (documentation of aws-ofi-nccl and of
awsome-distributed-training). The bootstrap interface is the one that carries the private address, never a fixed name.
"""

from __future__ import annotations

from micsctl.topology.model import NodeFacts


def environment(node: NodeFacts) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
    }
