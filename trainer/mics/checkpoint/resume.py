"""Where a run begins: its own newest whole checkpoint, else that of `resume_from`, else from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from mics.checkpoint.agree import from_every_rank, on_every_rank, on_first_rank, readable_reason
from mics.checkpoint.files import crc32_of
from mics.checkpoint.marks import MARK, Identity, Mark, Progress, differences, parse_name, size_problem
from mics.checkpoint.stores import Store, open_store
from mics.errors import RunRefusedError


@dataclass(frozen=True)
class Resume:
    """
    checkpoint  where it lies; None = a fresh start
    notes       one line each: what was skipped and why, and whether samples are counted anew
    """

    checkpoint: str | None
    progress: Progress
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Search:
    """What was found in one folder. `damaged`: checkpoints that were once whole."""

    found: tuple[str, Mark] | None
    skipped: tuple[str, ...]
    damaged: int


def find_resume(
    own_folder: str | None, resume_from: str | None, identity: Identity, group: dist.ProcessGroup | None = None
) -> Resume:
    """The newest whole checkpoint that this run may go on from. Collective; the same on every rank.

    own_folder   of this run's checkpoints: a restarted run goes on by itself; None = it does not save
    resume_from  one checkpoint, or the folder of another run's

    Every file of the candidate is read and compared with its checksum, the files spread over the ranks. Raises
    RunRefusedError on every rank where the candidate holds another model, where `resume_from` holds no whole
    checkpoint, or where all of the run's own are damaged.
    """
    own = _search(own_folder, group) if own_folder else _Search(None, (), 0)
    if own.found:
        unused = [f"resume_from {resume_from} is not used: this run goes on from its own"] if resume_from else []
        return _resume(own.found, identity, [*own.skipped, *unused])
    if own.damaged:
        raise RunRefusedError(
            f"all checkpoints of this run are damaged ({'; '.join(own.skipped)}). It does not start over by itself: "
            f"move {own_folder} away to let it"
        )
    if resume_from is None:
        return Resume(None, Progress(), own.skipped)
    other = _search(resume_from, group)
    if not other.found:
        reasons = f" ({'; '.join(other.skipped)})" if other.skipped else ""
        raise RunRefusedError(f"resume_from: {resume_from} holds no whole checkpoint{reasons}")
    return _resume(other.found, identity, [*own.skipped, *other.skipped])


def _resume(found: tuple[str, Mark], identity: Identity, notes: Sequence[str]) -> Resume:
    where, mark = found
    model = differences(mark.identity.model, identity.model)
    if model:
        raise RunRefusedError(f"{where} holds another model than train.model: {model}")
    data = differences(identity.data, mark.identity.data)
    if not data:
        return Resume(where, mark.progress, tuple(notes))
    said = f"samples are counted from 0 again, since the data of this run is not that of {where}: {data}"
    return Resume(where, Progress(mark.progress.step, 0), (*notes, said))


def _search(location: str, group: dist.ProcessGroup | None) -> _Search:
    """Go from the newest to the oldest checkpoint at `location` until one is whole."""
    parent, _, last = location.rstrip("/").rpartition("/")
    store = on_every_rank(lambda: open_store(parent if parse_name(last) else location), group, RunRefusedError)
    names = [last] if parse_name(last) else on_first_rank(lambda: _newest_first(store), group, RunRefusedError)
    skipped: list[str] = []
    damaged = 0
    for name in names:
        mark, problem = on_first_rank(partial(_read_mark, store, name), group, RunRefusedError)
        if mark and not problem:
            problem = _sum_problem(store, name, mark, group)
        if mark and not problem:
            return _Search((store.path(name), mark), tuple(skipped), damaged)
        skipped.append(f"skipped {name}: {problem}")
        damaged += mark is not None
    return _Search(None, tuple(skipped), damaged)


def _newest_first(store: Store) -> list[str]:
    parsed = {name: place for name in store.folders() if (place := parse_name(name))}
    return sorted(parsed, key=lambda name: parsed[name], reverse=True)


def _read_mark(store: Store, name: str) -> tuple[Mark | None, str | None]:
    """The mark, and what is wrong with the checkpoint as far as sizes tell."""
    sizes = store.sizes_bytes(name)
    if MARK not in sizes:
        return None, f"it was never finished (no {MARK})" if name in store.folders() else "nothing is there"
    try:
        mark = Mark.from_json(store.read(f"{name}/{MARK}").decode())
    except ValueError as error:
        return None, str(error)
    return mark, size_problem(mark, sizes)


def _sum_problem(store: Store, name: str, mark: Mark, group: dist.ProcessGroup | None) -> str | None:
    """The first file whose content is not what was written; each rank reads its share of the files."""
    mine = sorted(mark.files)[dist.get_rank(group) :: dist.get_world_size(group)]
    problems = from_every_rank([text for file in mine if (text := _file_problem(store, name, file, mark))], group)
    return min((text for some in problems for text in some), default=None)


def _file_problem(store: Store, name: str, file: str, mark: Mark) -> str | None:
    try:
        found = crc32_of(store, f"{name}/{file}")
    except (OSError, RunRefusedError) as error:
        return f"{file} cannot be read: {readable_reason(error)}"
    written = mark.files[file].crc32
    return None if found == written else f"{file} has CRC-32 {found} instead of {written}"
