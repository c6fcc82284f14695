"""What a benchmark compares: ways to train the same model on the same machines. Pure, standard library only.

`bench.json` lies beside run.json in the run's folder. The model, the batch and the machines stand in run.json; its own
strategy does not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mics.strategies import STRATEGIES, Reshard, rank_grid
from mics.topology import RankGrid
from mics.traffic import one_pass, per_step

ReduceScatterKind = Literal["ring", "native", "direct"]
PeerName = Literal["fsdp2", "fsdp2-hsdp", "deepspeed-zero3", "deepspeed-hpz"]
PEERS: tuple[str, ...] = get_args(PeerName)


@dataclass(frozen=True)
class Entry:
    """One way to train.

    name                   unique in a benchmark
    strategy               one of `mics.strategies.STRATEGIES`, or one of PEERS
    partition_size         p: the devices that hold one copy of the model states
    hierarchical           collectives in two stages (strategy mics with p > k)
    reduce_scatter         of hop 1 on CPU: a ring as NCCL's; gloo's own, an all-reduce inside; each shard straight to
                           its owner. GPUs always use NCCL's
    micro_steps            per optimizer step
    second_gather          deepspeed-*: gather the weights again for the backward pass, as it does with large models
    hop2_every_micro_step  all-reduce over the replicas at each micro-step, not at the boundary alone
    """

    name: str
    strategy: str
    partition_size: int
    hierarchical: bool = False
    reduce_scatter: ReduceScatterKind = "ring"
    micro_steps: int = 4
    second_gather: bool = False
    hop2_every_micro_step: bool = False


@dataclass(frozen=True)
class BenchConfig:
    """bench.json.

    entries                   compared; in which order changes from round to round
    warmup_steps              rounds that are not counted
    steps                     rounds that are: in each, every entry makes one optimizer step
    together                  all entries are in memory at once and take turns step by step; else one after the other
    emulated_compute_seconds  of one micro-step's forward and backward pass together, on each rank: a rank that has
                              computed for less waits for the rest; 0 = do not wait
    """

    entries: tuple[Entry, ...]
    warmup_steps: int = 3
    steps: int = 7
    together: bool = True
    emulated_compute_seconds: float = 0.0

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a benchmark needs entries with different names, got {names}")
        if self.warmup_steps < 0 or self.steps < 1:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be 0 or more, steps {self.steps} at least 1")
        if not 0 <= self.emulated_compute_seconds < math.inf:
            raise ValueError(
                f"emulated_compute_seconds must be 0 or more and finite, got {self.emulated_compute_seconds}"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchConfig:
        """Raises ValueError where it is no bench.json."""
        try:
            raw: Mapping[str, Any] = json.loads(text)
            return cls(**{**raw, "entries": tuple(Entry(**entry) for entry in raw["entries"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"bench.json: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> BenchConfig:
        return cls.from_json(Path(path).read_text())


def grid_of(entry: Entry, *, nodes: int, devices_per_node: int) -> RankGrid:
    """The rank grid of an entry on these machines; peers use the natural rank order.

    Raises ValueError where they cannot have it, or where its settings contradict each other.
    """
    n, k, p = nodes * devices_per_node, devices_per_node, entry.partition_size
    if entry.strategy not in (*STRATEGIES, *PEERS):
        raise ValueError(f"unknown strategy {entry.strategy!r}; known: {', '.join((*STRATEGIES, *PEERS))}")
    if entry.reduce_scatter not in get_args(ReduceScatterKind):
        known = ", ".join(get_args(ReduceScatterKind))
        raise ValueError(f"unknown reduce_scatter {entry.reduce_scatter!r}; known: {known}")
    if entry.micro_steps < 1:
        raise ValueError(f"micro_steps must be at least 1, got {entry.micro_steps}")
    if entry.second_gather and not entry.strategy.startswith("deepspeed-"):
        raise ValueError(f"second_gather belongs to deepspeed-*, not to {entry.strategy}")
    if entry.hierarchical and entry.reduce_scatter != "ring":
        raise ValueError(f"a hierarchical reduce-scatter is a ring, not {entry.reduce_scatter}")
    if entry.strategy in STRATEGIES:
        return rank_grid(entry.strategy, world_size=n, devices_per_node=k, partition=p, hierarchical=entry.hierarchical)
    if entry.hierarchical:
        raise ValueError(f"{entry.strategy} is flat; hierarchical collectives belong to strategy mics")
    if entry.strategy == "deepspeed-hpz" and k == 1:
        raise ValueError(
            "deepspeed-hpz keeps a copy of the weights on each node; a node of one device has none to share"
        )
    if entry.strategy == "fsdp2-hsdp" and p == n:
        raise ValueError(f"fsdp2-hsdp with partition size {p} has one replica only: that is fsdp2")
    if entry.strategy != "fsdp2-hsdp" and p != n:
        raise ValueError(f"strategy {entry.strategy} fixes the partition size to {n}, not {p}")
    return RankGrid(n, k, p)


def reshard_of_entry(entry: Entry) -> Reshard:
    """Benchmarks free gathered weights after the forward pass, as equal memory asks for; zero2 keeps them."""
    return "step" if entry.strategy == "zero2" else True


def traffic_bytes(
    entry: Entry,
    *,
    nodes: int,
    devices_per_node: int,
    block_bytes: float,
    root_bytes: float,
    block_gradient_bytes: float | None = None,
    root_gradient_bytes: float | None = None,
    kept_bytes: float = 0.0,
    on_cpu: bool = True,
) -> float:
    """Bytes that leave a node per optimizer step of an entry, payload only (`mics.traffic`).

    block_bytes, root_bytes   gathered weights of all blocks and of the rest, in the dtype of the gather
    *_gradient_bytes          in the dtype of the reduction (DeepSpeed's is that of the gather); None = as weights
    kept_bytes                weights of the last matrix of the last block, which DeepSpeed keeps for the backward pass
                              even with `second_gather`
    on_cpu                    collectives are gloo's; on GPUs every reduce-scatter is a ring

    Of a reduce-scatter of M bytes over p > k ranks a ring sends (p-1)/p M from each node, gloo's own (an all-reduce
    inside) twice that, and the exchange of each chunk with its owner k (p-k)/p M: k senders, p-k owners elsewhere.

    DeepSpeed's ZeRO-3 gathers all weights once per micro-step, twice with `second_gather`; hpZ once per optimizer step,
    since its copy on the node lives until the weights change. In fact it sends a little less: parameters of less than
    1e5 elements are gathered once per optimizer step.

    Raises ValueError as `grid_of`.
    """
    grid = grid_of(entry, nodes=nodes, devices_per_node=devices_per_node)
    step = per_step(
        grid,
        block_bytes=block_bytes,
        root_bytes=root_bytes,
        block_gradient_bytes=block_bytes if block_gradient_bytes is None else block_gradient_bytes,
        root_gradient_bytes=root_bytes if root_gradient_bytes is None else root_gradient_bytes,
        micro_steps=entry.micro_steps,
        reshard=reshard_of_entry(entry),
    )
    gather, weights = step.gather, block_bytes + root_bytes
    if entry.strategy == "deepspeed-hpz":
        gather = one_pass(grid, weights)
    elif entry.strategy == "deepspeed-zero3":
        again = weights - kept_bytes if entry.second_gather else 0.0
        gather = entry.micro_steps * one_pass(grid, weights + again)
    over_ring = _over_ring(entry, grid) if on_cpu else 1.0
    hops2 = entry.micro_steps if entry.hop2_every_micro_step else 1
    return gather + over_ring * step.reduce_scatter + hops2 * step.hop2


def _over_ring(entry: Entry, grid: RankGrid) -> float:
    """How many times the bytes of a ring the entry's reduce-scatter sends from a node, on gloo."""
    p, k = grid.partition_size, grid.devices_per_node
    if entry.strategy in PEERS or entry.reduce_scatter == "native":
        return 2.0
    return k * (p - k) / (p - 1) if entry.reduce_scatter == "direct" and p > k else 1.0
