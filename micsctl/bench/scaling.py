"""Weak and strong scaling: the jobs, the emulated compute, the efficiencies. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from mics.entries import Entry

from micsctl.bench.model import ScalingRow, Site, Spread
from micsctl.bench.result import Step

WEAK, STRONG = "weak", "strong"
_COMPUTES_LONGER = 1.25  # than it waits: a step on the fewest nodes, where nearly no hop 2 is left


def entries(nodes: int, sizes: Sequence[int], *, partition_size: int, micro_steps: int) -> tuple[Entry, ...]:
    """The entries of a job on so many nodes.

    Weak: the batch of a device is fixed. Strong: the batch of all devices is, so that its micro-steps are shared out.
    """
    return (
        Entry(WEAK, "mics", partition_size, micro_steps=micro_steps),
        Entry(STRONG, "mics", partition_size, micro_steps=strong_micro_steps(nodes, sizes)),
    )


def strong_micro_steps(nodes: int, sizes: Sequence[int]) -> int:
    """The fewest with which every size has a whole number of them, and nodes * micro-steps is the same for all."""
    return math.lcm(*sizes) // nodes


def emulated_compute_seconds(
    hop2_bytes: Mapping[int, float], planned: Mapping[int, float], site: Site, *, micro_steps: int
) -> float | None:
    """Seconds of one micro-step's compute on each rank; None where the link's rate is not known.

    The same at every number of nodes, as weak scaling has it: such that compute : hop 2's transfer is nowhere above
    the planner's figure. At one node there is no hop 2.

    hop2_bytes  that leave each node in a step, by the number of nodes
    planned     compute : hop 2's transfer by the number of nodes
    """
    steps = []
    for nodes, sent in hop2_bytes.items():
        seconds = site.transfer_seconds(sent)
        if seconds is None:
            return None
        if nodes > 1:
            steps.append(planned[nodes] * seconds)
    return min(steps) / micro_steps if steps else None


def rows(
    sizes: Sequence[int],
    jobs: Mapping[int, Sequence[Sequence[Step]]],
    site: Site,
    *,
    hop2_bytes: Mapping[int, float],
    planned: Mapping[int, float],
    compute_seconds: float | None,
    micro_steps: int,
) -> tuple[ScalingRow, ...]:
    """One row for each number of nodes.

    jobs  by the number of nodes the steps of each round's job

    Efficiencies against the smallest size: each round's own ratio, and the median over the rounds.
    """
    least = min(sizes)
    found = []
    for nodes in sizes:
        sent = hop2_bytes[nodes]
        link_seconds = site.transfer_seconds(sent)
        ratio = None
        if compute_seconds is not None and link_seconds:
            ratio = compute_seconds * micro_steps / link_seconds
        count = strong_micro_steps(nodes, sizes)
        found.append(
            ScalingRow(
                nodes=nodes,
                weak_step_seconds=Spread.of(_medians(jobs[nodes], WEAK)),
                weak_efficiency=_efficiency(jobs[least], jobs[nodes], WEAK, 1.0),
                weak_micro_steps=micro_steps,
                strong_step_seconds=Spread.of(_medians(jobs[nodes], STRONG)),
                strong_efficiency=_efficiency(jobs[least], jobs[nodes], STRONG, least / nodes),
                strong_micro_steps=count,
                hop2_bytes=sent,
                compute_per_hop2=ratio,
                planned_compute_per_hop2=planned.get(nodes) if nodes > 1 else None,
            )
        )
    return tuple(found)


def _medians(rounds: Sequence[Sequence[Step]], entry: str) -> list[float]:
    """Of each round the median step."""
    return [median(step.step_seconds for step in steps if step.entry == entry and not step.warmup) for steps in rounds]


def _efficiency(first: Sequence[Sequence[Step]], these: Sequence[Sequence[Step]], entry: str, ideal: float) -> float:
    """`ideal`: the share of the smallest size's step that would be perfect."""
    pairs = zip(_medians(first, entry), _medians(these, entry), strict=True)
    return median(one * ideal / other for one, other in pairs)


def notes(site: Site, compute_seconds: float | None, table: Sequence[ScalingRow]) -> tuple[str, ...]:
    """What the figures are: proof or illustration."""
    if compute_seconds is not None:
        wanted = compute_seconds * table[0].weak_micro_steps
        alone = table[0].weak_step_seconds.median
        slow = (
            f"A step takes {alone:.1f} s where the wait alone takes {wanted:.1f} s: the ranks compute longer than that,"
            " so these efficiencies say less"
        )
        return (
            *((slow,) if alone > _COMPUTES_LONGER * wanted else ()),
            "Emulated: each rank waits until a micro-step's forward and backward pass have taken"
            f" {compute_seconds:.2f} s, so that compute : hop 2's transfer is nowhere above what the time model says of"
            " bert-10b on as many p3dn. Every byte of communication is real",
            "One node has no hop 2 and waits as long as the others",
            "Hop 2 hides under the last micro-step alone: where a step has more of them than here, less of it can hide",
        )
    if site.emulated:
        return (
            "All ranks share the cores of this machine, so more nodes compute slower: without --emulate-compute these"
            " efficiencies say nothing",
        )
    return ()
