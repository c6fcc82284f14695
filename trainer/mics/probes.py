"""What `mics.measure` is asked: which collectives, over which groups, with which messages. Pure, standard library only.

`measure.json` lies beside run.json in the run's folder. Nodes and devices stand in run.json; its strategy does not
count.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from mics.topology import RankGrid, partition_sizes
from mics.traffic import hop2, one_pass

Collective = Literal["gather", "reduce_scatter", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Form = Literal["flat", "hierarchical"]
FORMS: tuple[Form, ...] = get_args(Form)
MIB = 1 << 20


@dataclass(frozen=True)
class MeasureConfig:
    """measure.json.

    partition_sizes  () = all that the nodes allow
    forms            hierarchical counts where a partition group spans nodes of several devices
    message_bytes    a whole message, as the weights of one block are: gathered, or to be reduced, over a partition
                     group; all_reduce is the hop 2 of that message, so each rank brings its shard. () = none
    repeats          of each cell at most
    seconds          for all collectives; the first pass of each cell, which connects the ranks, and one repeat come in
                     any case
    tcp_seconds      of the single TCP stream, in each direction; 0 = none
    pairs            a stream between every two nodes; else between nodes 0 and 1
    """

    collectives: tuple[Collective, ...] = COLLECTIVES
    partition_sizes: tuple[int, ...] = ()
    forms: tuple[Form, ...] = FORMS
    message_bytes: tuple[int, ...] = (MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB)
    repeats: int = 7
    seconds: float = 300.0
    tcp_seconds: float = 3.0
    pairs: bool = False

    def __post_init__(self) -> None:
        for name, known in (("collectives", COLLECTIVES), ("forms", FORMS)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"measure.json: {name} has {unknown[0]!r}; known: {', '.join(known)}")
        counts = (*self.partition_sizes, *self.message_bytes, self.repeats)
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(
                f"measure.json: partition_sizes {self.partition_sizes}, message_bytes {self.message_bytes} and "
                f"repeats {self.repeats} must be whole numbers of at least 1"
            )
        if self.seconds < 0 or self.tcp_seconds < 0:
            raise ValueError(
                f"measure.json: seconds {self.seconds} and tcp_seconds {self.tcp_seconds} must be 0 or more"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MeasureConfig:
        """Raises ValueError where it is no measure.json."""
        try:
            raw: Mapping[str, Any] = json.loads(text)
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
            }
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"measure.json: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> MeasureConfig:
        return cls.from_json(Path(path).read_text())


@dataclass(frozen=True)
class Cell:
    """One collective over the groups of one grid."""

    collective: Collective
    grid: RankGrid

    def __str__(self) -> str:
        form = " hierarchical" if self.grid.hierarchical else ""
        return f"{self.collective.replace('_', '-')} p={self.grid.partition_size}{form}"

    def traffic_bytes(self, message_bytes: float) -> float:
        """That leave each node (`mics.traffic`)."""
        return hop2(self.grid, message_bytes) if self.collective == "all_reduce" else one_pass(self.grid, message_bytes)

    def ring_bytes(self, message_bytes: float) -> float:
        """That each device sends in a flat ring: what NCCL's tests call bus bandwidth is this by seconds."""
        p, r = self.grid.partition_size, self.grid.replicas
        return message_bytes * (2 * (r - 1) / r / p if self.collective == "all_reduce" else (p - 1) / p)


def cells(config: MeasureConfig, *, world_size: int, devices_per_node: int) -> tuple[Cell, ...]:
    """All that is to be timed. Both forms have the same hop 2, so it is timed once.

    Raises ValueError for a partition size that these nodes cannot have.
    """
    n, k = world_size, devices_per_node
    found = []
    for p in config.partition_sizes or partition_sizes(n, k):
        for form in config.forms:
            if form == "hierarchical" and not p > k > 1:
                continue
            grid = RankGrid(n, k, p, hierarchical=form == "hierarchical")
            found += [Cell(name, grid) for name in config.collectives if name != "all_reduce" and p > 1]
        if "all_reduce" in config.collectives and p < n:
            found.append(Cell("all_reduce", RankGrid(n, k, p)))
    return tuple(found)


Pair = tuple[int, int]


def pairings(nodes: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds in which each node is in at most one pair; every two nodes meet once.

    The circle method of round-robin tournaments: one stays, the others move on by one place. With an odd number of
    nodes one of them rests in each round.
    """
    places = nodes + nodes % 2
    circle = list(range(places))
    rounds = []
    for _ in range(places - 1):
        met = [(min(pair), max(pair)) for pair in zip(circle[: places // 2], reversed(circle), strict=False)]
        rounds.append(tuple(sorted(pair for pair in met if pair[1] < nodes)))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(rounds)


def slice_rates(arrivals: Sequence[tuple[float, int]], *, slices: int) -> list[float]:
    """Bytes per second in each slice of a stream but the first, where TCP still looks for its rate.

    arrivals  seconds and bytes so far, at each read. A slice begins and ends with a read; where there are fewer reads,
              there are fewer slices
    """
    times = [seconds for seconds, _ in arrivals]
    wanted = [times[0] + (times[-1] - times[0]) * i / slices for i in range(1, slices + 1)]
    borders = sorted({min(bisect_left(times, moment), len(times) - 1) for moment in wanted})
    return [(arrivals[b][1] - arrivals[a][1]) / (times[b] - times[a]) for a, b in pairwise(borders)]
