"""What a benchmark found. Field names are those of result.json. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

PAYS_FROM = 1.1  # a speed-up below this is not worth a change of strategy


@dataclass(frozen=True)
class Site:
    """Where it ran.

    level       of the sandbox, "netns" or "process"; else the provider, "aws"
    link_mbps   of each node's emulated link; None where it is not shaped
    mtu_bytes   of the interface whose counters are read; None where there is none and communicators count
    device      "cpu", or the GPU's name
    free_memory_bytes  of the node with least, when asked
    """

    nodes: int
    ranks_per_node: int
    level: str
    link_mbps: int | None
    mtu_bytes: int | None
    device: str
    free_memory_bytes: float

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def emulated(self) -> bool:
        return self.level in ("netns", "process")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def caption(self) -> str:
        """What every time must carry that was measured here."""
        backend = "CPU/gloo" if self.on_cpu else f"{self.device}/NCCL"
        if not self.emulated:
            return f"{backend}, {self.nodes} nodes x {self.ranks_per_node} devices"
        if self.link_mbps is None:
            return f"{backend}, links not shaped: seconds say nothing about networks"
        return f"{backend}, emulated link of {self.link_mbps} Mbit/s"

    def transfer_seconds(self, traffic_bytes: float) -> float | None:
        """That the link alone needs; None where its rate is not known."""
        return traffic_bytes * 8 / (self.link_mbps * 1e6) if self.link_mbps else None


@dataclass(frozen=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(median(found), min(found), max(found))


@dataclass(frozen=True)
class Row:
    """One way to train, measured. Bytes are sent per node and optimizer step.

    strategy           one of mics' strategies or a peer, with what is unusual: "mics, hop 2 every micro-step"
    speedup_vs_zero3   over zero3 with the ring: the median of the ratios within each round
    traffic_source     "interface", "counted" (by our communicators), or "" where nothing counts
    held_bytes         of model states, and of gathered weights that stay, per device
    step_over_bound    step / max(the same on unshaped links, traffic / link)
    """

    strategy: str
    partition_size: int
    hierarchical: bool
    reduce_scatter: str
    step_seconds: Spread
    unshaped_step_seconds: float | None
    traffic_bytes: float | None
    traffic_formula_bytes: float
    speedup_vs_zero3: float | None
    loss: float
    name: str
    traffic_source: str
    held_bytes: float
    step_over_bound: float | None

    @property
    def traffic_difference(self) -> float | None:
        """Measured over formula, less one."""
        if self.traffic_bytes is None or not self.traffic_formula_bytes:
            return None
        return self.traffic_bytes / self.traffic_formula_bytes - 1


@dataclass(frozen=True)
class Claim:
    """A ratio of two rows' steps: how many times faster `fast` is; the median of the ratios within each round."""

    fast: str
    slow: str
    ratio: float
    note: str = ""


@dataclass(frozen=True)
class Strategies:
    """`bench strategies`."""

    nodes: int
    ranks_per_node: int
    micro_steps: int
    link_mbps: int | None
    rows: tuple[Row, ...]
    emulated: bool
    caption: str
    parameters: int
    sequence: int
    micro_batch: int
    steps: int
    warmup_steps: int
    claims: tuple[Claim, ...]
    losses_agree_to: float  # relative; 16-bit formats differ in the order of additions
    losses_equal: bool
    interleaved: bool  # one step of each in every round; otherwise one strategy after the other, for want of memory
    largest_loss_difference: float  # relative, over all entries and rounds
    on_cpu: bool
    left_out: tuple[str, ...]  # what is not compared, and why


@dataclass(frozen=True)
class TrafficCell:
    """One strategy at one (p, k, s)."""

    name: str
    partition_size: int
    devices_per_node: int
    micro_steps: int
    nodes: int
    traffic_bytes: float | None
    traffic_formula_bytes: float
    traffic_source: str
    allowed_bytes: tuple[float, float]  # from, to

    @property
    def difference(self) -> float | None:
        if self.traffic_bytes is None or not self.traffic_formula_bytes:
            return None
        return self.traffic_bytes / self.traffic_formula_bytes - 1

    @property
    def ok(self) -> bool:
        """Within what is allowed, or not measured."""
        low, high = self.allowed_bytes
        return self.traffic_bytes is None or low <= self.traffic_bytes <= high


@dataclass(frozen=True)
class Traffic:
    """`bench traffic`."""

    ok: bool
    cells: tuple[TrafficCell, ...]
    parameters: int
    allowance: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class ScalingRow:
    """One number of nodes."""

    nodes: int
    weak_step_seconds: Spread
    weak_efficiency: float
    weak_micro_steps: int
    strong_step_seconds: Spread
    strong_efficiency: float
    strong_micro_steps: int
    hop2_bytes: float  # that leave each node, by the formula
    compute_per_hop2: float | None  # emulated compute of a weak step : seconds that hop 2 needs on the link
    planned_compute_per_hop2: float | None  # of bert-10b on as many p3dn


@dataclass(frozen=True)
class Scaling:
    """`bench scaling`. Efficiencies are those against the smallest number of nodes."""

    ranks_per_node: int
    link_mbps: int | None
    rows: tuple[ScalingRow, ...]
    caption: str
    parameters: int
    partition_size: int
    rounds: int
    steps: int
    emulated_compute_seconds: float | None  # of a micro-step on each rank
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """How much faster mics (p = k) is than zero3, where computing takes so many times what zero3's traffic takes."""

    compute_per_traffic: float
    speedup: float
    what: str  # "400 Mbit/s", "14.1 s of compute at 1600 Mbit/s", "p4d, bert-10b"


@dataclass(frozen=True)
class Crossover:
    """`bench strategies --sweep`: where it stops paying.

    stops_over_*  compute_per_traffic from which on the speed-up is below PAYS_FROM; 0 where it is nowhere above; None
                  where it is never seen below
    """

    nodes: int
    ranks_per_node: int
    over_links: tuple[Point, ...]
    over_compute: tuple[Point, ...]
    predicted: tuple[Point, ...]
    stops_over_links: float | None
    stops_over_compute: float | None
    caption: str
    parameters: int


@dataclass(frozen=True)
class Rate:
    """One collective at one size."""

    message_bytes: int
    repeats: int
    seconds: Spread
    bytes_per_second: float | None  # that left each node; None where nothing leaves it
    share_of_tcp: float | None


@dataclass(frozen=True)
class Collective:
    """One collective over the groups of one partition size, and the line through its times."""

    collective: str
    partition_size: int
    hierarchical: bool
    latency_seconds: float | None
    bytes_per_second: float | None  # without the latency, per node
    bus_bytes_per_second: float | None  # per device, as in a flat ring: where nothing leaves the node
    rates: tuple[Rate, ...]

    @property
    def name(self) -> str:
        form = ", hierarchical" if self.hierarchical else ""
        return f"{self.collective.replace('_', '-')}, p = {self.partition_size}{form}"


@dataclass(frozen=True)
class Collectives:
    """`bench collectives`."""

    nodes: int
    ranks_per_node: int
    link_mbps: int | None
    tcp_bytes_per_second: float | None  # of one stream between nodes 0 and 1; None on one node
    rows: tuple[Collective, ...]
    caption: str
