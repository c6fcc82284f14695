"""The benchmarks, each on a testbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from mics.config import Precision, TrainConfig
from mics.entries import BenchConfig, Entry
from mics.shapes import PRESETS, ModelShape

from micsctl.bench import cells, predicted, result, scaling
from micsctl.bench.crossover import stops_at
from micsctl.bench.formula import held_bytes, hop2_bytes, sent_bytes, unfit
from micsctl.bench.job import has_deepspeed
from micsctl.bench.model import Crossover, Point, Scaling, Site, Strategies, Traffic, TrafficCell
from micsctl.bench.result import Step
from micsctl.bench.testbed import Job, Testbed
from micsctl.errors import UsageError
from micsctl.planner.partition import MARGIN

_SEQUENCE = 64  # tokens per rank and micro-step


class EntriesOf(Protocol):
    """`cells.strategies` or `cells.traffic`."""

    def __call__(
        self, names: Sequence[str], *, world_size: int, devices_per_node: int, on_cpu: bool
    ) -> tuple[Entry, ...]: ...


def model_of(
    name: str | None, train: TrainConfig | None = None, *, default: str | ModelShape = cells.DEFAULT_MODEL
) -> TrainConfig:
    """What a benchmark trains. A preset in the train section of mics.yaml, where both are given; else the model alone,
    one short sequence in a micro-step. Pure.

    Raises UsageError for a name that is no preset, as bytes and parameters of other models are not known here, and for
    a preset that the train section does not suit.
    """
    if name is not None and name not in PRESETS:
        raise UsageError(f"--model {name!r} is no preset", f"presets: {', '.join(PRESETS)}")
    if name and train:
        try:
            return replace(train, model=name)
        except ValueError as error:
            raise UsageError(
                f"cannot train --model {name} as mics.yaml says", str(error), next="edit mics.yaml"
            ) from None
    return TrainConfig(
        model=name or default,
        sequence=_SEQUENCE,
        micro_batch=1,
        accumulation=cells.MICRO_STEPS,
        checkpointing="none",
    )


def strategies_job(testbed: Testbed, names: Sequence[str], *, steps: int, warmup: int) -> tuple[Job, tuple[str, ...]]:
    """The measured job, and what it leaves out and why. Raises UsageError where nothing is left to compare."""
    entries, left_out = comparable(testbed, names, cells.strategies)
    if not entries:
        raise UsageError("nothing is left to compare", "\n".join(left_out))
    return testbed.train(BenchConfig(entries, warmup_steps=warmup, steps=steps)), left_out


def strategies(job: Job, unshaped: Job | None, left_out: Sequence[str]) -> Strategies:
    """What the job says. Pure.

    unshaped  the same on links that are not shaped; None where there is none
    """
    rows = result.rows(
        job.entries,
        job.steps,
        unshaped.steps if unshaped else (),
        job.site,
        formula=_known(sent_bytes, job),
        held=_known(held_bytes, job),
    )
    difference, tolerance = result.largest_loss_difference(job.steps), result.losses_agree_to(job.run.precision)
    return Strategies(
        nodes=job.site.nodes,
        ranks_per_node=job.site.ranks_per_node,
        micro_steps=job.entries[0].micro_steps,
        link_mbps=job.site.link_mbps,
        rows=rows,
        emulated=job.site.emulated,
        caption=job.site.caption,
        parameters=job.shape.parameters,
        sequence=job.run.train.sequence,
        micro_batch=job.run.micro_batch,
        steps=job.config.steps,
        warmup_steps=job.config.warmup_steps,
        claims=result.claims(job.entries, job.steps, rows, job.site),
        losses_agree_to=tolerance,
        losses_equal=difference <= tolerance,
        interleaved=job.config.together,
        on_cpu=job.site.on_cpu,
        largest_loss_difference=difference,
        left_out=tuple(left_out),
    )


def _known(formula: Callable[[Entry, ModelShape, Precision, Site], float], job: Job) -> Callable[[Entry], float]:
    """A formula for the entries of a job."""
    return lambda entry: formula(entry, job.shape, job.run.precision, job.site)


def comparable(
    testbed: Testbed, names: Sequence[str], entries_of: EntriesOf
) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The entries of these strategies that the nodes can run with this model, and what is left out and why."""
    site, precision = testbed.site, testbed.precision
    shape = {"world_size": site.world_size, "devices_per_node": site.ranks_per_node}
    asks = any(name.startswith("deepspeed-") for name in names)
    refused = cells.refused(names, precision=precision, with_deepspeed=asks and has_deepspeed(testbed.hosts))
    can = [name for name in names if name not in refused]
    entries = entries_of(can, **shape, on_cpu=site.on_cpu)
    left_out = [f"{name}: left out, {why}" for name, why in refused.items()]
    left_out += cells.missing(can, entries, **shape)
    device_bytes = None if site.on_cpu else MARGIN * testbed.topology.device_memory_bytes
    reasons = [unfit(entry, testbed.shape, precision, site, device_bytes=device_bytes) for entry in entries]
    left_out += [f"{entry.name}: left out, {why}" for entry, why in zip(entries, reasons, strict=True) if why]
    return tuple(entry for entry, why in zip(entries, reasons, strict=True) if not why), tuple(left_out)


def traffic(testbed: Testbed, names: Sequence[str], *, steps: int, warmup: int) -> Traffic:
    """Every strategy at every p on one testbed; no cell where it can have none."""
    entries, left_out = comparable(testbed, names, cells.traffic)
    found: tuple[TrafficCell, ...] = ()
    if entries:
        job = testbed.train(BenchConfig(entries, warmup_steps=warmup, steps=steps))
        found = result.traffic_cells(entries, job.steps, testbed.site, formula=_known(sent_bytes, job))
    ok = all(cell.ok for cell in found)
    return Traffic(ok, found, testbed.shape.parameters, result.allowance(testbed.site), left_out)


def traffic_result(parts: Sequence[Traffic]) -> Traffic:
    """Several testbeds as one. Pure. Raises UsageError where none had a cell."""
    left_out = tuple(dict.fromkeys(line for part in parts for line in part.left_out))
    if not any(part.cells for part in parts):
        raise UsageError("nothing is left to measure", "\n".join(left_out))
    return Traffic(
        ok=all(part.ok for part in parts),
        cells=tuple(cell for part in parts for cell in part.cells),
        parameters=parts[0].parameters,
        allowance=parts[0].allowance,  # of the same interfaces
        left_out=left_out,
    )


def scale(testbed: Testbed, sizes: Sequence[int], *, steps: int, warmup: int, rounds: int, emulate: bool) -> Scaling:
    """Jobs of each size in turns, so that what slows the machine for a while slows all sizes alike."""
    k, micro_steps, planned = testbed.site.ranks_per_node, cells.MICRO_STEPS, predicted.compute_per_hop2_of(sizes)
    testbeds = {nodes: testbed.first(nodes) for nodes in sizes}
    entries = {nodes: scaling.entries(nodes, sizes, partition_size=k, micro_steps=micro_steps) for nodes in sizes}
    hop2 = {
        nodes: hop2_bytes(entries[nodes][0], testbed.shape, testbed.precision, testbeds[nodes].site) for nodes in sizes
    }
    compute = None
    if emulate:
        compute = scaling.emulated_compute_seconds(hop2, planned, testbed.site, micro_steps=micro_steps)
        if compute is None:
            why = "compute is emulated in proportion to hop 2, which needs shaped links and a size above one node"
            raise UsageError("--emulate-compute is not possible here", why)
    jobs: dict[int, list[Sequence[Step]]] = {nodes: [] for nodes in sizes}
    for number in range(rounds):
        turn = number % len(sizes)
        for nodes in (*sizes[turn:], *sizes[:turn]):
            config = BenchConfig(
                entries[nodes], warmup_steps=warmup, steps=steps, emulated_compute_seconds=compute or 0.0
            )
            jobs[nodes].append(testbeds[nodes].train(config).steps)
    rows = scaling.rows(
        sizes, jobs, testbed.site, hop2_bytes=hop2, planned=planned, compute_seconds=compute, micro_steps=micro_steps
    )
    return Scaling(
        ranks_per_node=k,
        link_mbps=testbed.site.link_mbps,
        rows=rows,
        caption=testbed.site.caption,
        parameters=testbed.shape.parameters,
        partition_size=k,
        rounds=rounds,
        steps=steps,
        emulated_compute_seconds=compute,
        notes=scaling.notes(testbed.site, compute, rows),
    )


def require_shaped(testbed: Testbed) -> None:
    """Raises UsageError where links cannot be shaped, as at the process level of the sandbox."""
    if testbed.site.level != "netns":
        raise UsageError(
            "a sweep over link rates needs shaped links",
            f"the sandbox runs at level {testbed.site.level}, which has none",
            next="run it as root on Linux",
        )


def crossover_job(testbed: Testbed, *, steps: int, warmup: int, compute_per_traffic: float | None = None) -> Job:
    """zero3 against mics; with emulated compute that is so many times what zero3's traffic needs on the link."""
    entries = cells.crossover(world_size=testbed.site.world_size, devices_per_node=testbed.site.ranks_per_node)
    seconds = 0.0
    if compute_per_traffic is not None:
        needed = testbed.site.transfer_seconds(sent_bytes(entries[0], testbed.shape, testbed.precision, testbed.site))
        seconds = compute_per_traffic * (needed or 0.0) / entries[0].micro_steps
    return testbed.train(BenchConfig(entries, warmup_steps=warmup, steps=steps, emulated_compute_seconds=seconds))


def crossover(unshaped: Job, over_links: Sequence[Job], over_compute: Sequence[Job]) -> Crossover:
    """Pure."""
    zero3 = unshaped.entries[0].name
    alone = median(result.seconds_by_round(unshaped.steps, zero3).values())
    links = tuple(_point(job, alone, f"{job.site.link_mbps} Mbit/s") for job in over_links)
    compute = tuple(_compute_point(job, alone) for job in over_compute)
    rates = sorted({job.site.link_mbps for job in (*over_links, *over_compute) if job.site.link_mbps})
    return Crossover(
        nodes=unshaped.site.nodes,
        ranks_per_node=unshaped.site.ranks_per_node,
        over_links=links,
        over_compute=compute,
        predicted=predicted.crossover(),
        stops_over_links=stops_at(links),
        stops_over_compute=stops_at(compute),
        caption=f"CPU/gloo, emulated links of {', '.join(map(str, rates))} Mbit/s",
        parameters=unshaped.shape.parameters,
    )


def _compute_point(job: Job, alone_seconds: float) -> Point:
    """Where a step computes longer than it is made to wait, that is its compute."""
    seconds = max(alone_seconds, job.config.emulated_compute_seconds * job.entries[0].micro_steps)
    return _point(job, seconds, f"{seconds:.1f} s of compute at {job.site.link_mbps} Mbit/s")


def _point(job: Job, compute_seconds: float, what: str) -> Point:
    zero3, mics = job.entries
    link_seconds = job.site.transfer_seconds(sent_bytes(zero3, job.shape, job.run.precision, job.site))
    faster = result.speedup(job.steps, fast=mics.name, slow=zero3.name)
    assert link_seconds is not None  # the links of a crossover are shaped, and each entry has made its steps
    assert faster is not None
    return Point(compute_seconds / link_seconds, faster, what)
