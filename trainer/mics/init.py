"""Initial weights that depend neither on p nor on n.

Every rank draws each parameter whole, from a generator keyed by (seed, the parameter's name), and keeps its own slice.
Per-rank seeds would give replicas that differ from the start, and nothing would complain. CPU and GPU generators
differ, so weights are the same for every p and n on one kind of device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Fill = Callable[[str, Tensor, torch.Generator], None]


def key_of(seed: int, name: str) -> int:
    """A 63-bit key for one parameter. Pure."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "big") >> 1


def materialise(model: nn.Module, fill: Fill, *, seed: int, device: torch.device) -> None:
    """Give a model built on meta (sharded or not) its memory on `device` and its initial weights. Sends nothing."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device).manual_seed(key_of(seed, name))
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            fill(name, full, generator)
            if isinstance(parameter, DTensor):
                mine = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(mine.to_local())
            else:
                parameter.copy_(full)
