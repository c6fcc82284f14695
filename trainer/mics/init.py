"""Initial weights that depend neither on p nor on n.

Every rank draws each parameter whole, from a generator keyed by (seed, the parameter's name), and keeps its own slice.
One parameter is whole at a time, the model never is. Per-rank seeds would give replicas that differ from the start, and
nothing would complain. CPU and GPU generators differ, so weights are the same for every p and n on one kind of device.
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
    """Give a model whose parameters are on meta (sharded or not) its memory on `device` and its initial weights.

    Sends nothing. Buffers that have values keep them (rotary tables); tied parameters stay tied.
    """
    allocate(model, device)
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


def allocate(model: nn.Module, device: torch.device) -> None:
    """Memory without values for the parameters. `Module.to_empty` alone forgets buffers and unties plain tensors."""
    tied = _tied(model)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    for (owner, key), *others in tied:
        for other, other_key in others:
            setattr(other, other_key, getattr(owner, key))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if not buffers[name].is_meta:
            buffer.copy_(buffers[name])


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, key))
    return [found for found in places.values() if len(found) > 1]
