"""This process among the others: who it is, how it joins them, and how they decide together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public; torch does not mark it so

from mics.config import LimitsConfig, RunConfig
from mics.errors import RunRefusedError

T = TypeVar("T")
MARGIN_SECONDS = 120.0  # the stall watchdog speaks first: it can name the rank that the others wait for
LONGEST_SECONDS = 365 * 86400.0  # gloo counts in nanoseconds of 64 bits


@dataclass(frozen=True)
class Place:
    """What torchrun tells each process through its environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size


def place_of(environment: Mapping[str, str]) -> Place:
    """Read torchrun's variables. Raises RunRefusedError where they are missing."""
    try:
        rank, local, world, per_node = (
            int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
    except (KeyError, ValueError) as error:
        raise RunRefusedError(
            f"this is one of many processes and torchrun starts them all: {error} is not set. "
            "Try: torchrun --nnodes NODES --nproc-per-node DEVICES -m mics.train --config run.json"
        ) from None
    return Place(rank, local, world, per_node)


def check_place(place: Place, *, nodes: int, devices_per_node: int) -> None:
    """Raises RunRefusedError where torchrun started other numbers of processes than run.json says."""
    if (place.world_size, place.local_world_size) != (nodes * devices_per_node, devices_per_node):
        raise RunRefusedError(
            f"run.json says {nodes} nodes x {devices_per_node} devices = {nodes * devices_per_node} processes, "
            f"torchrun started {place.world_size} with {place.local_world_size} on this node"
        )


def node_names(run: RunConfig) -> tuple[str, ...]:
    """The name of each rank's node, by rank: its instance id where run.json has it. Pure."""
    nodes = [run.node_of(rank) for rank in range(run.world_size)]
    return tuple(run.node_names[node] if run.node_names else f"node {node}" for node in nodes)


def collective_timeout(limits: LimitsConfig) -> timedelta:
    """For every process group: longer than the limits of the stall watchdog, so that it speaks first. Pure."""
    longest = max(limits.first_step_seconds, limits.step_seconds) + MARGIN_SECONDS
    return timedelta(seconds=min(longest, LONGEST_SECONDS))


def meet(place: Place, environment: Mapping[str, str], *, timeout: timedelta) -> TCPStore:
    """This rank's connection to the store where all ranks meet, at MASTER_ADDR:MASTER_PORT.

    It waits for the store but not for the other ranks, unlike torch's own env:// rendezvous: so a rank that never comes
    is a stall that the watchdog can name. torchrun serves the store itself and says so; otherwise rank 0 does.
    """
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise RunRefusedError(f"torchrun tells where rank 0 is, but {error} is not set") from None
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        host,
        port,
        place.world_size,
        is_master=place.rank == 0 and not served,
        timeout=timeout,
        wait_for_workers=False,
    )


def join(place: Place, store: Store | None = None, *, timeout: timedelta | None = None) -> torch.device:
    """Join the other processes: NCCL on one GPU each where there are GPUs, otherwise gloo on the CPU.

    With GPUs, gloo is there too, for what is on the CPU: objects, and states on their way to a checkpoint.

    store    from `meet`; None = torch's env:// rendezvous
    timeout  of each collective of the world's group, see `collective_timeout`
    """
    rank, size = (place.rank, place.world_size) if store is not None else (-1, -1)
    if torch.cuda.is_available():
        if torch.cuda.device_count() < place.local_world_size:
            raise RunRefusedError(
                f"this node has {torch.cuda.device_count()} GPUs, run.json asks for {place.local_world_size}"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        # device_id: NCCL connects here and now, so a broken network shows before the model is built.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
        return device
    # One thread per rank: ranks share the cores, and sums come out the same on every machine.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return torch.device("cpu")


def leave(at_most_seconds: float | None = None) -> None:
    """Wait for the other ranks, then leave them; where they do not come in time (None = any), leave as if they had."""
    together = dist.barrier(async_op=True)
    try:  # a fast rank would close connections that a slow one still reads: gloo aborts then, at times
        together.wait(*[timedelta(seconds=at_most_seconds)] if at_most_seconds else ())
    except RuntimeError:
        if not at_most_seconds:
            raise
        return
    dist.destroy_process_group()


def together(check: Callable[[], T], place: Place) -> T:
    """Run `check` on every rank; where one rank refuses, all do, with the reason of the first.

    Otherwise the refusing rank leaves and the others wait for it.
    """
    value: T | None = None
    problem: str | None = None
    try:
        value = check()
    except RunRefusedError as error:
        problem = f"node {place.node}: {error}"
    problems: list[str | None] = [None] * place.world_size
    dist.all_gather_object(problems, problem)
    first = next((text for text in problems if text), None)
    if first:
        raise RunRefusedError(first)
    return value  # type: ignore[return-value]  # check() returned it


def every_node(text: str, place: Place) -> list[str]:
    """The text of each node's local rank 0, by node. The same on every rank."""
    texts: list[str] = [""] * place.world_size
    dist.all_gather_object(texts, text)
    return texts[:: place.local_world_size]
