"""Write one checkpoint: every rank its file, then the mark, then remove what is not needed any more."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from mics.checkpoint.agree import first_failure, from_every_rank, on_first_rank
from mics.checkpoint.files import StoreWriter
from mics.checkpoint.marks import MARK, Identity, Mark, Progress, folder_name, parse_name, size_problem
from mics.checkpoint.retention import to_remove
from mics.checkpoint.stores import Store


class SaveFailedError(Exception):
    """A checkpoint could not be written; one readable line says where and why. The older ones are untouched."""


def write_checkpoint(
    store: Store, tensors: Mapping[str, Tensor], progress: Progress, identity: Identity, group: dist.ProcessGroup
) -> str:
    """Write `tensors` (this rank's part) and return the checkpoint's folder. Collective over `group`, all ranks.

    A checkpoint exists once its mark does. Raises SaveFailedError on every rank where one of them fails; what was
    written then lies there without a mark until the next save removes it.
    """
    folder = on_first_rank(lambda: _free_folder(store, progress.step), group, SaveFailedError)
    writer = StoreWriter(store, folder)
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise SaveFailedError(f"{store.path(folder)}: {first_failure(error)}") from error
    sums = {name: part[name] for part in from_every_rank(writer.fs.sums, group) for name in part}
    mark = Mark(progress, identity, sums).to_json().encode()
    on_first_rank(lambda: store.write(f"{folder}/{MARK}", mark), group, SaveFailedError)
    return folder


def _free_folder(store: Store, step: int) -> str:
    """A name that no checkpoint has; what dead saves left is removed first. No other save may be at work."""
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
