"""This process among the others: who it is, how it joins them, and how they decide together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mics.errors import RunRefusedError

T = TypeVar("T")


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


def join(place: Place) -> torch.device:
    """Join the other processes: NCCL on one GPU each where there are GPUs, otherwise gloo on the CPU."""
    if torch.cuda.is_available():
        if torch.cuda.device_count() < place.local_world_size:
            raise RunRefusedError(
                f"this node has {torch.cuda.device_count()} GPUs, run.json asks for {place.local_world_size}"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    # One thread per rank: ranks share the cores, and sums come out the same on every machine.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def leave() -> None:
    dist.barrier()  # a fast rank would close connections that a slow one still reads: gloo aborts then, at times
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
