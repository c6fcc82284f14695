"""Messages between two members of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist


def send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Start to send to the member of the group at this place."""
    return _work(dist.isend(tensor, group=group, group_dst=to, tag=tag))


def receive(tensor: torch.Tensor, of: int, group: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Start to receive from the member of the group at this place."""
    return _work(dist.irecv(tensor, group=group, group_src=of, tag=tag))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only who is not in the group gets none
    return work
