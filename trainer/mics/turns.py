"""Collectives timed in turns, so that what disturbs the machine for a while disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mics.sharding import Connection, collectives_of

Timed = Callable[[], None]


def in_turns(
    passes: Sequence[Timed], *, repeats: int, enough: Callable[[], bool], device: torch.device
) -> list[list[float]]:
    """Seconds of each pass by repeat, of the slowest rank. The same on every rank. Collective over the world.

    Every second repeat goes backwards and every two begin one pass later, so that none always follows the same one:
    what a pass leaves behind (a full bucket of a shaped link, say) serves each in its turn. Ends after `repeats`,
    or with the first repeat after which any rank has `enough`.
    """
    measured: list[list[float]] = []
    while len(measured) < repeats:
        first = len(measured) // 2 % len(passes)
        order = [*range(first, len(passes)), *range(first)]
        taken = {place: _seconds_of(passes[place], device) for place in (order[::-1] if len(measured) % 2 else order)}
        row = torch.tensor([*(taken[place] for place in range(len(passes))), enough()], dtype=torch.float64)
        row = row.to(device)
        dist.all_reduce(row, op=dist.ReduceOp.MAX)
        *slowest, ended = row.tolist()
        measured.append(slowest)
        if ended:
            break
    return measured


def memory_for(message_bytes: float, world_size: int, device: torch.device) -> torch.Tensor:
    """Working memory for passes of messages up to this size, over groups of this world: zeros in fp32."""
    return torch.zeros(2 * (int(message_bytes) // 4 + world_size), device=device)


def gather_pass(connection: Connection, message_bytes: float, memory: torch.Tensor) -> Timed:
    """A gather of `message_bytes` over the partition group, as FSDP2 calls it."""
    gather, _ = collectives_of(connection)
    whole, _ = _buffers(connection, message_bytes, memory)
    mine = whole.chunk(connection.shard.size())[connection.shard.rank()]

    def one() -> None:
        work = gather(whole, mine, connection.shard)
        if work is not None:  # as FSDP2 does before it uses the output
            work.wait()

    return one


def reduce_scatter_pass(connection: Connection, message_bytes: float, memory: torch.Tensor) -> Timed:
    """A reduce-scatter of `message_bytes` over the partition group, as FSDP2 calls it."""
    _, reduce_scatter = collectives_of(connection)
    whole, part = _buffers(connection, message_bytes, memory)

    def one() -> None:
        reduce_scatter(part, whole, connection.shard, dist.ReduceOp.SUM)

    return one


def all_reduce_pass(connection: Connection, message_bytes: float, memory: torch.Tensor) -> Timed:
    """The hop 2 of a message that had `message_bytes` before hop 1: an all-reduce of this rank's shard of it."""
    _, part = _buffers(connection, message_bytes, memory)

    def one() -> None:
        dist.all_reduce(part, group=connection.replicate)

    return one


def _buffers(connection: Connection, message_bytes: float, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole message, padded to the partition group, and a shard of one."""
    size = connection.shard.size()
    mine = -(-int(message_bytes) // (4 * size))
    return memory[: mine * size], memory[mine * size : mine * (size + 1)]


def _seconds_of(one: Timed, device: torch.device) -> float:
    dist.barrier()
    _finish(device)
    started = time.perf_counter()
    one()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
