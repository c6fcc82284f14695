"""Weights from a folder of safetensors, as transformers writes it; each rank reads its own rows only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics.errors import RunRefusedError
from mics.models.names import Piece, pieces
from mics.models.transformer import Transformer


def check_weights(model: nn.Module, folder: Path) -> None:
    """Raises RunRefusedError where `folder` does not hold every parameter of the model in its shape. Reads no weights.

    The model may be on meta, sharded or not.
    """
    with_name = _files(folder)
    for name, parameter in model.named_parameters():
        shapes = [_their_shape(with_name, piece, name, folder) for piece in _pieces(model, name)]
        found = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if found != tuple(parameter.shape):
            raise RunRefusedError(f"{folder}: {name} has the shape {found}, the model needs {tuple(parameter.shape)}")


def load_weights(model: nn.Module, folder: Path) -> None:
    """Overwrite the parameters of a model that has its memory, after `check_weights`. Sends nothing.

    A rank reads the rows of its own shards, one parameter at a time; other dtypes are converted.
    """
    with_name = _files(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, first = _local_rows(parameter)
            if local.numel():
                rows = slice(first, first + len(local))
                local.copy_(_read(with_name, _pieces(model, name), rows))


def rows_of(size: int, parts: int, index: int) -> slice:
    """The rows of the shard `index` of `parts`, as torch.chunk cuts them: the last ones may be short or empty. Pure."""
    each = -(-size // parts)
    return slice(min(index * each, size), min((index + 1) * each, size))


def _local_rows(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """This rank's shard, and the number of its first row in the whole tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh, local = parameter.device_mesh, parameter.to_local()
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard(dim=0):
            return local, rows_of(parameter.shape[0], mesh.size(axis), mesh.get_local_rank(axis)).start
    return local, 0


def _pieces(model: nn.Module, name: str) -> tuple[Piece, ...]:
    return pieces(model.shape, name) if isinstance(model, Transformer) else (Piece(name),)


def _files(folder: Path) -> Mapping[str, Any]:
    """Every tensor of the folder by name, with the open file that has it. Raises RunRefusedError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RunRefusedError(f"safetensors is not installed: {sys.executable} -m pip install safetensors") from error
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise RunRefusedError(f"{folder} holds no .safetensors file")
    found = {}
    for path in paths:
        try:
            file: Any = safe_open(path, framework="pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise RunRefusedError(f"{path} cannot be read as safetensors: {error}") from error
        found.update(dict.fromkeys(names, file))
    return found


def _find(with_name: Mapping[str, Any], piece: Piece) -> str:
    """The name under which the files have it: its own, its copy's, or without the prefix of the model's body; or ""."""
    names = (piece.name, piece.copy, piece.name.partition(".")[2])
    return next((name for name in names if name in with_name), "")


def _their_shape(with_name: Mapping[str, Any], piece: Piece, ours: str, folder: Path) -> tuple[int, ...]:
    name = _find(with_name, piece)
    for needed, found in ((piece.name, name), (piece.plus, piece.plus in with_name)):
        if needed and not found:
            raise RunRefusedError(f"{folder}: no tensor {needed} in its files, for {ours}")
    shape = tuple(with_name[name].get_slice(name).get_shape())
    return shape[::-1] if piece.transposed else shape


def _read(with_name: Mapping[str, Any], parts: Sequence[Piece], wanted: slice) -> Tensor:
    """The wanted rows of our tensor, from those of its pieces that hold some of them."""
    read, first = [], 0
    for piece in parts:
        name = _find(with_name, piece)
        whole: Any = with_name[name].get_slice(name)
        rows = whole.get_shape()[-1 if piece.transposed else 0]
        start, stop = (min(max(at - first, 0), rows) for at in (wanted.start, wanted.stop))
        if start < stop:
            part = whole[:, start:stop].T if piece.transposed else whole[start:stop]
            read.append(part.float() + with_name[piece.plus].get_slice(piece.plus)[:1] if piece.plus else part)
        first += rows
    return torch.cat(read)
