"""What one rank did or found, on every rank, also when it failed: nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mics.errors import RunRefusedError

T = TypeVar("T")


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None, failure: type[Exception]) -> T:
    """What `action` returned on rank 0. Raises `failure` with a readable line on every rank where it failed there."""
    said: list[tuple[T | None, str | None]] = [(None, None)]
    if dist.get_rank(group) == 0:
        try:
            said = [(action(), None)]
        except (OSError, RunRefusedError) as error:
            said = [(None, readable_reason(error))]
    dist.broadcast_object_list(said, group=group, group_src=0)
    value, problem = said[0]
    if problem:
        raise failure(problem)
    return value  # type: ignore[return-value]  # action() returned it


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None, failure: type[Exception]) -> T:
    """What `action` returned here. Raises `failure` with a readable line on every rank where it failed on one."""
    value: T | None = None
    problem: str | None = None
    try:
        value = action()
    except (OSError, RunRefusedError) as error:
        problem = readable_reason(error)
    for rank, said in enumerate(from_every_rank(problem, group)):
        if said:
            raise failure(f"rank {rank}: {said}")
    return value  # type: ignore[return-value]  # action() returned it


def from_every_rank(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    every: list[T] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def first_failure(error: CheckpointException) -> str:
    """ "rank 3: No space left on device: /fsx/..." for the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {readable_reason(cause)}"


def readable_reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, RunRefusedError) else f"{type(error).__name__}: {error}"
