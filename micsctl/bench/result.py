"""From the lines of mics.bench to what they say. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mics.config import Precision
from mics.entries import Entry

from micsctl.bench.cells import label
from micsctl.bench.model import Claim, Row, Site, Spread, TrafficCell

TRAFFIC_AGREES_TO = 0.01
# besides payload, in a step: barriers, the loss, the gradient's norm, and the laptop's looks at the run
FIXED_BYTES = 100_000
_FRAME_BYTES = 14 + 20 + 20 + 12  # Ethernet as counters see it, IPv4, TCP, its timestamps
_PACKET_BYTES = _FRAME_BYTES - 14  # of which the MTU counts
_RIVALS = ("zero3", "deepspeed-zero3", "deepspeed-hpz", "fsdp2-hsdp")
_LOSSES_AGREE_TO = {"fp64": 1e-4, "fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class Step:
    """One optimizer step of one entry."""

    entry: str
    round: int
    warmup: bool
    step_seconds: float
    loss: float  # NaN where it was not finite
    traffic_bytes: float | None
    counted_bytes: float | None


def steps_of(lines: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """From metrics.jsonl of mics.bench."""
    return tuple(
        Step(
            entry=line["entry"],
            round=line["round"],
            warmup=line["warmup"],
            step_seconds=line["step_seconds"],
            loss=math.nan if line["loss"] is None else line["loss"],
            traffic_bytes=line["traffic_bytes"],
            counted_bytes=line["counted_bytes"],
        )
        for line in lines
    )


def seconds_by_round(steps: Iterable[Step], entry: str) -> dict[int, float]:
    return {step.round: step.step_seconds for step in steps if step.entry == entry and not step.warmup}


def speedup(steps: Sequence[Step], *, fast: str, slow: str) -> float | None:
    """How many times faster: the median over the rounds of the ratio within one; None where one was not measured.

    Within a round both ran on the same machine at nearly the same time, so that what slows one slows the other.
    """
    fasts, slows = seconds_by_round(steps, fast), seconds_by_round(steps, slow)
    ratios = [slows[number] / fasts[number] for number in fasts.keys() & slows.keys()]
    return median(ratios) if ratios else None


def rows(
    entries: Sequence[Entry],
    steps: Sequence[Step],
    unshaped: Sequence[Step],
    site: Site,
    *,
    formula: Callable[[Entry], float],
    held: Callable[[Entry], float],
) -> tuple[Row, ...]:
    """One row for each entry, in their order.

    unshaped  the same job on links that are not shaped; () where there is none
    formula   payload that leaves a node in an optimizer step
    held      bytes that stay on a device
    """
    ring = next((entry.name for entry in entries if entry.strategy == "zero3" and entry.reduce_scatter == "ring"), "")
    return tuple(
        _row(entry, steps, unshaped, site, formula(entry), held(entry), speedup(steps, fast=entry.name, slow=ring))
        for entry in entries
    )


def _row(
    entry: Entry,
    steps: Sequence[Step],
    unshaped: Sequence[Step],
    site: Site,
    formula_bytes: float,
    held_bytes: float,
    faster: float | None,
) -> Row:
    mine = [step for step in steps if step.entry == entry.name and not step.warmup]
    seconds = Spread.of(step.step_seconds for step in mine)
    alone = list(seconds_by_round(unshaped, entry.name).values())
    bare_seconds = median(alone) if alone else None
    sent, source = measured_bytes(mine)
    link_seconds = site.transfer_seconds(formula_bytes)
    bound = None if bare_seconds is None or link_seconds is None else max(bare_seconds, link_seconds)
    return Row(
        strategy=label(entry),
        partition_size=entry.partition_size,
        hierarchical=entry.hierarchical,
        reduce_scatter=entry.reduce_scatter,
        step_seconds=seconds,
        unshaped_step_seconds=bare_seconds,
        traffic_bytes=sent,
        traffic_formula_bytes=formula_bytes,
        speedup_vs_zero3=faster,
        loss=mine[-1].loss,
        name=entry.name,
        traffic_source=source,
        held_bytes=held_bytes,
        step_over_bound=seconds.median / bound if bound else None,
    )


def measured_bytes(steps: Iterable[Step]) -> tuple[float | None, str]:
    """The median step's traffic and who counted it: the interface, or our communicators where it has none."""
    found = list(steps)
    for source, values in (
        ("interface", [step.traffic_bytes for step in found if step.traffic_bytes is not None]),
        ("counted", [step.counted_bytes for step in found if step.counted_bytes is not None]),
    ):
        if values:
            return median(values), source
    return None, ""


def losses_agree_to(precision: Precision) -> float:
    """The relative difference that is still the same training: 16-bit sums depend on their order."""
    return _LOSSES_AGREE_TO[precision]


def largest_loss_difference(steps: Iterable[Step]) -> float:
    """Between any two entries in the same round, relative to the larger; infinite where a loss is not finite."""
    by_round: dict[int, list[float]] = {}
    for step in steps:
        by_round.setdefault(step.round, []).append(step.loss)
    return max((_relative_range(losses) for losses in by_round.values()), default=0.0)


def _relative_range(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.inf
    largest = max(map(abs, values))
    return (max(values) - min(values)) / largest if largest else 0.0


def claims(entries: Sequence[Entry], steps: Sequence[Step], table: Sequence[Row], site: Site) -> tuple[Claim, ...]:
    """The ratios that the paper's claims are about. The first is the headline, where its rows were measured.

    Headline: mics at p = k over the fastest of zero3 (ring), deepspeed-* and fsdp2-hsdp that hold no more bytes on a
    device than mics does. There is none without zero3: on CPU all others use gloo's own reduce-scatter.
    """
    by_name, k = {row.name: row for row in table}, site.ranks_per_node

    def find(strategy: str, p: int | None = None, *, kind: str = "") -> Entry | None:
        return next(
            (
                entry
                for entry in entries
                if label(entry) == strategy and p in (None, entry.partition_size)
                if kind in ("", entry.reduce_scatter)
            ),
            None,
        )

    mics = find("mics", k)
    ring, hierarchical, flat = find("zero3", kind="ring"), find("mics", 2 * k), find("mics-flat", 2 * k)
    pairs: list[tuple[Entry | None, Entry | None, str]] = []
    if mics:
        budget = by_name[mics.name].held_bytes
        rivals = [e for e in entries if _is_rival(e, on_cpu=site.on_cpu) and by_name[e.name].held_bytes <= budget]
        best = min(rivals, key=lambda entry: by_name[entry.name].step_seconds.median, default=None)
        who = ", ".join(label(entry) for entry in rivals)
        note = f"headline: the fastest of {who} at equal memory" if ring in rivals else ""
        pairs.append((mics, best, note))
        pairs += [(mics, rival, "") for rival in rivals if rival != best]
    pairs.append((hierarchical, flat, "two stages against one"))
    pairs.append((hierarchical, ring, ""))
    pairs.append((mics, find("mics, hop 2 every micro-step"), "hop 2 at the boundary alone"))
    found = []
    for fast, slow, note in pairs:
        ratio = speedup(steps, fast=fast.name, slow=slow.name) if fast and slow else None
        if fast and slow and ratio is not None:
            found.append(Claim(fast.name, slow.name, ratio, note))
    return tuple(found)


def _is_rival(entry: Entry, *, on_cpu: bool) -> bool:
    """On CPU zero3 counts with the ring alone, and fsdp2, the same with gloo's own reduce-scatter, does not: that sends
    twice the bytes of NCCL's."""
    rivals = _RIVALS if on_cpu else (*_RIVALS, "fsdp2")
    return entry.strategy in rivals and (entry.strategy != "zero3" or entry.reduce_scatter == "ring")


def traffic_cells(
    entries: Sequence[Entry], steps: Sequence[Step], site: Site, *, formula: Callable[[Entry], float]
) -> tuple[TrafficCell, ...]:
    cells = []
    for entry in entries:
        sent, source = measured_bytes(step for step in steps if step.entry == entry.name and not step.warmup)
        expected = formula(entry)
        cells.append(
            TrafficCell(
                name=entry.name,
                partition_size=entry.partition_size,
                devices_per_node=site.ranks_per_node,
                micro_steps=entry.micro_steps,
                nodes=site.nodes,
                traffic_bytes=sent,
                traffic_formula_bytes=expected,
                traffic_source=source,
                allowed_bytes=allowed(expected, site.mtu_bytes if source == "interface" else None),
            )
        )
    return tuple(cells)


def allowed(formula_bytes: float, mtu_bytes: int | None) -> tuple[float, float]:
    """From where to where measured bytes may lie; an interface with this MTU counts TCP/IP's own bytes too."""
    low, high = formula_bytes * (1 - TRAFFIC_AGREES_TO), formula_bytes * (1 + TRAFFIC_AGREES_TO)
    return (low, high) if mtu_bytes is None else (low, high * (1 + overhead(mtu_bytes)) + FIXED_BYTES)


def overhead(mtu_bytes: int) -> float:
    """Bytes of TCP/IP for each byte of payload, at most: frames as large as the MTU and, since a node receives about
    as much as it sends, an acknowledgement for every second one that comes in (RFC 5681, 4.2).

    Where the kernel hands 64 KiB to the card in one piece, as it does on virtual links, the counter sees fewer headers.
    """
    payload = mtu_bytes - _PACKET_BYTES
    return 1.5 * _FRAME_BYTES / payload


def allowance(site: Site) -> str:
    """In words, for one site."""
    text = f"{TRAFFIC_AGREES_TO:.0%}"
    if site.mtu_bytes is None:
        return f"{text}; counted by mics' own communicators, as these nodes have no interface of their own"
    return (
        f"{text}, and above the formula {overhead(site.mtu_bytes):.2%} of TCP/IP headers and acknowledgements"
        f" (MTU {site.mtu_bytes}) and {FIXED_BYTES / 1e6:.1f} MB a step for barriers, the loss and the gradient's norm"
    )
