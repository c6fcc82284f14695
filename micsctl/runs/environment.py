"""Environment of the ranks on one node. Pure.

For EFA we set nothing of FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, NCCL_PROTO or NCCL_ALGO: aws-ofi-nccl >= 1.7 with
libfabric >= 1.18 chooses them, and a wrong value disables the fast path (documentation of aws-ofi-nccl and of
awsome-distributed-training). The bootstrap interface is the one that carries the private address, never a fixed name.
"""

from __future__ import annotations

from micsctl.topology.model import NodeFacts

# What a rank gets between SIGTERM and SIGKILL when torchrun ends it: as long as systemd gives a service at shutdown
# (DefaultTimeoutStopSec), so that a node that ends at its TTL can still write the checkpoint. `stop --grace` does not
# depend on it: it asks the ranks themselves, and torchrun only sees them end.
RANK_GRACE_SECONDS = 90


def environment(node: NodeFacts) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(RANK_GRACE_SECONDS),
        # the last collectives of each rank, written into the run's folder (start.sh says where) when one of them hangs
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
