"""What a checkpoint holds, as one flat dictionary of tensors, and which rank writes which of them.

    model.<name>            parameters and buffers; a tied one once, under its first name
    optimizer.<name>.<key>  the optimizer's tensors for one parameter
    scale.<name>            the loss scale of fp16

Sharded tensors are DTensors of the run's mesh: nothing is gathered, and the names do not depend on n, p or strategy.
The optimizer's settings (learning rate, decay) are not in it: they are those of the run, not of the one that saved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mics.errors import RunRefusedError
from mics.precision import LossScale


@dataclass(frozen=True)
class TrainState:
    """What changes during training, beside the progress. `scale` None: there is none."""

    model: nn.Module
    optimizer: Optimizer
    scale: LossScale | None = None


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """All tensors to save, by name: the memory of the run itself, no copies. Raises TypeError for other values."""
    model = _model_tensors(state.model)
    names = {id(tensor): name for name, tensor in model.items()}
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"the optimizer keeps {key} as {type(value).__name__}; only tensors can be saved")
            tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value
    scale = state.scale.state_dict() if state.scale else {}
    return tensors | {f"scale.{name}": value for name, value in scale.items()}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (the objects themselves) and persistent buffers; each once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the model keeps {name} as {type(tensor).__name__}; only tensors can be saved")
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def part_of_this_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that this rank writes, and so has to copy: about 1/n of all bytes on each rank.

    Each sharded tensor is written by one replica, the tensors spread evenly over the replicas; plain ones by rank 0.
    """
    replicas, mine = _replica(tensors)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items() if _sharded(tensor)}
    owners = spread(sizes, replicas)
    first = dist.get_rank() == 0
    return {name: tensor for name, tensor in tensors.items() if (owners[name] == mine if name in owners else first)}


def spread(sizes_bytes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """The replica that writes each tensor: the largest tensor first, to the replica with least so far. Pure."""
    owners, loads = {}, [0] * replicas
    for name, size in sorted(sizes_bytes.items(), key=lambda item: (-item[1], item[0])):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += size
    return owners


def _sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _replica(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many ranks hold the same shards as this one, and this one's place among them."""
    sharded = next((tensor for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    if sharded is None:
        return 1, 0
    mesh, coordinate = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    copies = [axis for axis, placement in enumerate(sharded.placements) if placement.is_replicate()]
    place = 0
    for axis in copies:
        place = place * mesh.size(axis) + coordinate[axis]
    return math.prod(mesh.size(axis) for axis in copies), place


def targets(state: TrainState, saved: Mapping[str, Any], checkpoint: str) -> dict[str, Tensor]:
    """Tensors to read `saved` (the metadata of each saved tensor) into: weights in place, new ones for the rest.

    Optimizer state of a parameter that does not train is left out, and a trained one without saved state stays without.
    Raises RunRefusedError where the model's tensors are not in the checkpoint or have other sizes.
    """
    model = _model_tensors(state.model)
    wanted = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    trained = {id(parameter) for group in state.optimizer.param_groups for parameter in group["params"]}
    for name, metadata in saved.items():
        part, _, rest = name.partition(".")
        owner = model.get(rest.rpartition(".")[0])
        if part == "optimizer" and owner is not None and id(owner) in trained and owner.requires_grad:
            wanted[name] = _room_for(metadata, owner)
    if state.scale:
        scale = {f"scale.{name}": value.clone() for name, value in state.scale.state_dict().items()}
        wanted |= {name: value for name, value in scale.items() if name in saved}
    _check(wanted, saved, checkpoint)
    return wanted


def _room_for(metadata: Any, parameter: Tensor) -> Tensor:
    dtype = metadata.properties.dtype
    if metadata.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # sharded like the parameter
    return torch.zeros(metadata.size, dtype=dtype)


def _check(wanted: Mapping[str, Tensor], saved: Mapping[str, Any], checkpoint: str) -> None:
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise RunRefusedError(f"{checkpoint} holds another model: it has no {missing[0]} ({len(missing)} are missing)")
    for name, tensor in wanted.items():
        if saved[name].size != tensor.shape:
            raise RunRefusedError(
                f"{checkpoint} holds another model: {name} is {list(saved[name].size)} instead of {list(tensor.shape)}"
            )


def put_back(state: TrainState, loaded: Mapping[str, Tensor]) -> None:
    """Give the optimizer and the loss scale what was read into `targets`; the model's weights are in place already."""
    names = {id(tensor): name for name, tensor in _model_tensors(state.model).items()}
    values: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in loaded.items():
        if name.startswith("optimizer."):
            owner, _, key = name.removeprefix("optimizer.").rpartition(".")
            values[owner][key] = tensor
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    own_settings = state.optimizer.state_dict()["param_groups"]
    found = {place: names[id(parameter)] for place, parameter in enumerate(parameters)}
    restored = {place: values[name] for place, name in found.items() if name in values}
    state.optimizer.load_state_dict({"state": restored, "param_groups": own_settings})
    scale = {name.removeprefix("scale."): tensor for name, tensor in loaded.items() if name.startswith("scale.")}
    if state.scale and scale:
        state.scale.load_state_dict(scale)
