"""Checkpoints that every node sees, at `<checkpoint folder>/step-<N>`, for any n, p and strategy.

A checkpoint is whole when its mark (`complete.json`) is there and every file that it lists has the size it lists. The
mark is written last, in a folder of another name, which is then renamed: a killed save never hurts an older checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from mics.errors import RunRefusedError
from mics.ranks import Place, together
from mics.shapes import ModelShape

MARK = "complete.json"
TOKEN_SECONDS = 10.0  # how long a new file may take until other nodes see it


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps done, and the first sample that no step has seen."""

    step: int = 0
    samples: int = 0


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, shape: ModelShape) -> Path:
    """Write `folder`/step-N and return it. Collective over all ranks; replicas write each shard once."""
    target = folder / f"step-{progress.step}"
    partial = target.with_suffix(".partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=partial)
    if first:
        _complete(partial, target, progress, shape)
    dist.barrier()
    return target


def _complete(partial: Path, target: Path, progress: Progress, shape: ModelShape) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    with (partial / MARK).open("w") as mark:
        json.dump({**asdict(progress), "model": asdict(shape), "files": files}, mark, indent=2)
        mark.flush()
        os.fsync(mark.fileno())
    replaced = target.with_suffix(".replaced")
    if target.exists():  # the same step of an earlier attempt
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Read model and optimizer from a whole checkpoint, whatever n, p and strategy wrote it. Collective over all ranks.

    The optimizer keeps its own settings (learning rate, decay): those of this run, not of the one that saved.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    mark = _read_mark(checkpoint)
    return Progress(mark["step"], mark["samples"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def is_whole(checkpoint: Path) -> bool:
    try:
        files: dict[str, int] = _read_mark(checkpoint)["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):  # no mark, half a mark, or a listed file is gone
        return False


def newest_whole(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step below `folder`; None where there is none."""
    whole = [path for path in folder.glob("step-*") if is_whole(path)]
    return max(whole, key=lambda path: (_read_mark(path)["step"], path.suffix == ""), default=None)


def to_resume(path: Path, shape: ModelShape) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one below it.

    Raises RunRefusedError where there is none, or where it holds another model.
    """
    found = path if is_whole(path) else newest_whole(path)
    if found is None:
        raise RunRefusedError(f"resume_from: {path} holds no whole checkpoint")
    saved = _read_mark(found)["model"]
    if saved != asdict(shape):
        different = [key for key, value in asdict(shape).items() if saved.get(key) != value]
        raise RunRefusedError(
            f"resume_from: {found} holds another model than train.model: "
            + ", ".join(f"{key} {saved.get(key)} instead of {getattr(shape, key)}" for key in different)
        )
    return found


def _read_mark(checkpoint: Path) -> dict[str, Any]:
    mark: dict[str, Any] = json.loads((checkpoint / MARK).read_text())
    return mark


def check_shared(path: Path, token: str, place: Place) -> None:
    """Rank 0 writes `token` below `path` and every rank must read it. Raises RunRefusedError on all ranks otherwise.

    Collective over all ranks. `token` is any text that no earlier attempt has used.
    """
    file = path / f".mics-{token}"
    if place.rank == 0:
        together(lambda: _write_token(file, token, path), place)
    else:
        together(lambda: None, place)
    together(lambda: _read_token(file, token, path), place)
    if place.rank == 0:
        file.unlink()


def _write_token(file: Path, token: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    except OSError as error:
        raise RunRefusedError(f"train.checkpoint.path {path} cannot be written: {error.strerror}") from error


def _read_token(file: Path, token: str, path: Path) -> None:
    deadline = time.monotonic() + TOKEN_SECONDS
    while not (file.is_file() and file.read_text() == token):
        if time.monotonic() > deadline:
            raise RunRefusedError(
                f"train.checkpoint.path {path} is not shared: this node does not see what rank 0 wrote there. "
                "Use a folder that every node sees, such as one below /fsx"
            )
        time.sleep(0.1)
