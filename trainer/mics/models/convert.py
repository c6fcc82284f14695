"""Between checkpoints of the trainer and folders that transformers loads.

  python -m mics.models.convert export --checkpoint CHECKPOINT --to FOLDER
  python -m mics.models.convert import FOLDER

CHECKPOINT is a step-N folder, or its s3:// name. export writes config.json and safetensors, one file in memory at a
time. import prints the lines of mics.yaml that start a run from a folder of transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mics.checkpoint.files import StoreReader
from mics.checkpoint.marks import MARK, Mark
from mics.checkpoint.stores import Store, open_store
from mics.errors import RunRefusedError
from mics.models.names import Piece, config_of, pieces, shape_of_config
from mics.shapes import ModelShape

PREFIX = "model."  # of the model's tensors in a checkpoint
SHARD_BYTES = 2 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(checkpoint: str, folder: Path, *, dtype: torch.dtype, config: Path | None = None) -> list[Path]:
    """Write a whole checkpoint as safetensors and config.json; returns the files of weights.

    config  of a model that is not bundled: its config.json; its tensors keep their names

    Memory: one file and a copy of it. Raises RunRefusedError for what is no checkpoint or has no configuration.
    """
    parent, _, name = checkpoint.rstrip("/").rpartition("/")
    store = open_store(parent or ".")
    shape = _shape_in(store, name)
    if shape is None and config is None:
        raise RunRefusedError(f"{checkpoint} holds a model of your own: give its config.json with --config")
    reader = StoreReader(store, name)
    sizes = _tensors(reader)
    shards = cut({name: tensor.size.numel() * dtype.itemsize for name, tensor in sizes.items()}, SHARD_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    if shape:
        (folder / "config.json").write_text(json.dumps({**config_of(shape), "dtype": str(dtype)[6:]}, indent=2) + "\n")
    elif config:
        shutil.copyfile(config, folder / "config.json")
    written, file_of, total_bytes = [], {}, 0
    for number, names in enumerate(shards, 1):
        theirs = _converted(reader, {name: sizes[name] for name in names}, shape, dtype)
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        _save(theirs, folder / file)
        written.append(folder / file)
        file_of.update(dict.fromkeys(theirs, file))
        total_bytes += sum(tensor.nbytes for tensor in theirs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return written


def cut(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in groups of at most `limit` bytes (or of one that is larger). Pure."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _shape_in(store: Store, name: str) -> ModelShape | None:
    """The shape in a checkpoint's mark; None for a model that is not bundled. Raises RunRefusedError."""
    try:
        identity = Mark.from_json(store.read(f"{name}/{MARK}").decode()).identity.model
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{store.path(name)} is no whole checkpoint: {error}") from error
    known = {field.name for field in fields(ModelShape)}
    return ModelShape(**dict[str, Any](identity)) if "hidden" in identity and set(identity) <= known else None


def _tensors(reader: StoreReader) -> dict[str, TensorStorageMetadata]:
    """The model's tensors by name, without their values."""
    found = reader.read_metadata().state_dict_metadata
    return {
        name.removeprefix(PREFIX): entry
        for name, entry in found.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }


def _converted(
    reader: StoreReader, sizes: Mapping[str, TensorStorageMetadata], shape: ModelShape | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    ours = {f"{PREFIX}{name}": torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in sizes.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(ours, storage_reader=reader, no_dist=True)
    theirs: dict[str, Tensor] = {}
    for name in sizes:
        theirs |= to_theirs(ours.pop(f"{PREFIX}{name}"), pieces(shape, name) if shape else (Piece(name),), dtype)
    return theirs


def to_theirs(ours: Tensor, parts: Sequence[Piece], dtype: torch.dtype) -> dict[str, Tensor]:
    """One of our tensors as those of transformers, with memory of their own."""
    found: dict[str, Tensor] = {}
    dtype = dtype if ours.is_floating_point() else ours.dtype
    first = 0
    for piece in parts:
        rows = ours[first : first + piece.rows] if piece.rows else ours
        first += piece.rows
        laid = (rows.T if piece.transposed else rows).to(dtype, copy=True).contiguous()
        found[piece.name] = laid
        if piece.copy:
            found[piece.copy] = laid.clone()
        if piece.plus:
            found[piece.plus] = laid.new_zeros(2, ours.shape[1])
    return found


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise RunRefusedError(f"safetensors is not installed: {sys.executable} -m pip install safetensors") from error
    save_file(dict(tensors), path, metadata={"format": "pt"})


def settings(folder: Path) -> str:
    """The lines of mics.yaml that start a run from a folder of transformers. Raises RunRefusedError."""
    path = folder / "config.json"
    try:
        shape = shape_of_config(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{path}: {error}") from error
    model = ", ".join(f"{name}: {json.dumps(value)}" for name, value in _without_defaults(shape).items())
    return f"train:\n  model: {{{model}}}\n  initial: {folder}\n"


def _without_defaults(shape: ModelShape) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(ModelShape)}
    return {name: value for name, value in asdict(shape).items() if value != defaults[name]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mics.models.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="a checkpoint to a folder that transformers loads")
    out.add_argument("--checkpoint", required=True, metavar="CHECKPOINT", help="one step-N")
    out.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    out.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (float32)")
    out.add_argument("--config", type=Path, metavar="FILE", help="config.json of a model that is not bundled")
    into = commands.add_parser("import", help="settings that start a run from a folder of transformers")
    into.add_argument("folder", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "import":
            sys.stdout.write(settings(chosen.folder.absolute()))
        else:
            for path in export(chosen.checkpoint, chosen.to, dtype=DTYPES[chosen.dtype], config=chosen.config):
                sys.stdout.write(f"{path}\n")
    except RunRefusedError as error:
        sys.stderr.write(f"mics: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
