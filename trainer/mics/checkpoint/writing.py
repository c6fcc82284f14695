"""Write one checkpoint: every rank its file, then the mark, then remove what is not needed any more."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from mics.checkpoint.agree import first_failure, from_every_rank, on_first_rank, readable_reason
from mics.checkpoint.files import StoreWriter
from mics.checkpoint.marks import MARK, Identity, Mark, Progress, folder_name, parse_name, size_problem
from mics.checkpoint.retention import to_remove
from mics.checkpoint.stores import Store
from mics.errors import RunRefusedError

OWNER = "owner"  # who may save here


class SaveFailedError(Exception):
    """A checkpoint could not be written; one readable line says where and why. The older ones are untouched."""


def claim(store: Store) -> str:
    """From now on the store is the caller's: a run that was started earlier and is still there saves no more into it.

    For one rank; what it returns proves the claim. Raises RunRefusedError where the store cannot be written.
    """
    owner = uuid.uuid4().hex
    try:
        store.make_folder("")
        store.write(OWNER, owner.encode())
    except OSError as error:
        reason = readable_reason(error)
        raise RunRefusedError(f"train.checkpoint.path: {store.location} cannot be written: {reason}") from error
    return owner


def _check_owner(store: Store, owner: str) -> None:
    """Two runs at once would remove each other's unfinished checkpoints, and write into the same files."""
    if store.exists(OWNER) and store.read(OWNER) != owner.encode():
        raise RunRefusedError(f"{store.location} belongs to a run that was started later")


def write_checkpoint(
    store: Store,
    tensors: Mapping[str, Tensor],
    progress: Progress,
    identity: Identity,
    group: dist.ProcessGroup,
    owner: str,
) -> str:
    """Write `tensors` (this rank's part) and return the checkpoint's folder. Collective over `group`, all ranks.

    owner  from `claim`, on rank 0

    A checkpoint exists once its mark does. Raises SaveFailedError on every rank where one of them fails; what was
    written then lies there without a mark until the next save removes it.
    """
    folder = on_first_rank(lambda: _free_folder(store, progress.step, owner), group, SaveFailedError)
    writer = StoreWriter(store, folder)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise SaveFailedError(f"{store.path(folder)}: {first_failure(error)}") from error
    sums = {name: part[name] for part in from_every_rank(writer.fs.sums, group) for name in part}
    mark = Mark(progress, identity, sums).to_json().encode()
    on_first_rank(lambda: _write_mark(store, f"{folder}/{MARK}", mark, owner), group, SaveFailedError)
    return folder


def _write_mark(store: Store, name: str, mark: bytes, owner: str) -> None:
    _check_owner(store, owner)
    store.write(name, mark)


def _free_folder(store: Store, step: int, owner: str) -> str:
    """A name that no checkpoint has; what dead saves left is removed first. No other save may be at work."""
    _check_owner(store, owner)
    store.drop_unfinished()
    attempts = [0]
    for name in store.folders():
        parsed = parse_name(name)
        if parsed is None:
            continue
        if not store.exists(f"{name}/{MARK}"):
            store.remove_folder(name)
        elif parsed[0] == step:
            attempts.append(parsed[1])
    folder = folder_name(step, max(attempts) + 1)
    store.make_folder(folder)
    return folder


def remove_old(store: Store, new: str, keep: int, keep_every: int) -> list[str]:
    """Remove the whole checkpoints that `to_remove` names, and return their folders. For one rank, once `new` is whole.

    One that is not whole counts for nothing and stays, and so does one of a later step than `new`: this run has passed
    over it because its content is damaged, or it belongs to another line of the run.
    """
    place = {name: parsed for name in store.folders() if (parsed := parse_name(name))}
    earlier = sorted((name for name in place if place[name] <= place[new]), key=lambda name: place[name])
    whole = [name for name in earlier if is_whole(store, name)]
    newest_of = {place[name][0]: name for name in whole}
    gone = set(to_remove(newest_of, keep, keep_every))
    removed = [name for name in whole if place[name][0] in gone or newest_of[place[name][0]] != name]
    for name in removed:
        store.remove_folder(name)
    return removed


def is_whole(store: Store, folder: str) -> bool:
    """Whether the mark is there and every file that it lists has its size."""
    sizes = store.sizes_bytes(folder)
    if MARK not in sizes:
        return False
    try:
        mark = Mark.from_json(store.read(f"{folder}/{MARK}").decode())
    except ValueError:
        return False
    return size_problem(mark, sizes) is None
