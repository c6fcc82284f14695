"""The benchmarks, each on a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from mics.config import Precision, TrainConfig
from mics.entries import BenchConfig, Entry
from mics.shapes import PRESETS, ModelShape

from micsctl.bench import cells, predicted, result, scaling
from micsctl.bench.crossover import stops_at
from micsctl.bench.formula import held_bytes, hop2_bytes, sent_bytes
from micsctl.bench.job import has_deepspeed
from micsctl.bench.model import Crossover, Place, Point, Scaling, Strategies, Traffic
from micsctl.bench.result import Step
from micsctl.bench.stage import Job, Stage
from micsctl.errors import UsageError

_SEQUENCE = 64  # tokens per rank and micro-step


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


def strategies_job(stage: Stage, names: Sequence[str], *, steps: int, warmup: int) -> Job:
    place = stage.place
    entries = cells.strategies(
        names, world_size=place.world_size, devices_per_node=place.ranks_per_node, on_cpu=place.on_cpu
    )
    if not entries:
        raise UsageError("nothing is left to compare", f"{', '.join(names)} on {place.nodes} x {place.ranks_per_node}")
    return stage.train(BenchConfig(entries, warmup_steps=warmup, steps=steps))


def strategies(job: Job, unshaped: Job | None, left_out: Sequence[str]) -> Strategies:
    """What the job says. Pure.

    unshaped  the same on links that are not shaped; None where there is none
    """
    rows = result.rows(
        job.entries,
        job.steps,
        unshaped.steps if unshaped else (),
        job.place,
        formula=_known(sent_bytes, job),
        held=_known(held_bytes, job),
    )
    difference = result.largest_loss_difference(job.steps)
    return Strategies(
        nodes=job.place.nodes,
        ranks_per_node=job.place.ranks_per_node,
        micro_steps=job.entries[0].micro_steps,
        link_mbps=job.place.link_mbps,
        rows=rows,
        emulated=job.place.emulated,
        caption=job.place.caption,
        parameters=job.shape.parameters,
        sequence=job.run.train.sequence,
        micro_batch=job.run.micro_batch,
        steps=job.config.steps,
        warmup_steps=job.config.warmup_steps,
        claims=result.claims(job.entries, job.steps, rows, k=job.place.ranks_per_node),
        losses_equal=difference <= result.LOSSES_AGREE_TO,
        largest_loss_difference=difference,
        left_out=tuple(left_out),
    )


def _known(formula: Callable[[Entry, ModelShape, Precision, Place], float], job: Job) -> Callable[[Entry], float]:
    """A formula for the entries of a job."""
    return lambda entry: formula(entry, job.shape, job.run.precision, job.place)


def possible(stage: Stage, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The strategies that these nodes can run, and what is left out and why."""
    without = cells.without_deepspeed(names)
    if without == tuple(names) or has_deepspeed(stage.hosts):
        return tuple(names), ()
    gone = ", ".join(name for name in names if name not in without)
    if not without:
        raise UsageError(f"cannot run {gone}", "DeepSpeed is not installed on the nodes", next="pip install '.[bench]'")
    return without, (f"{gone}: left out, DeepSpeed (extra bench) is not installed on the nodes",)


def traffic(stage: Stage, names: Sequence[str], *, steps: int, warmup: int) -> Traffic:
    """Every strategy at every p on one stage."""
    place = stage.place
    can, left_out = possible(stage, names)
    entries = cells.traffic(
        can, world_size=place.world_size, devices_per_node=place.ranks_per_node, on_cpu=place.on_cpu
    )
    job = stage.train(BenchConfig(entries, warmup_steps=warmup, steps=steps))
    found = result.traffic_cells(entries, job.steps, place, formula=_known(sent_bytes, job))
    return Traffic(all(cell.ok for cell in found), found, job.shape.parameters, result.allowance(place), left_out)


def traffic_result(parts: Sequence[Traffic]) -> Traffic:
    """Several stages as one. Pure."""
    return Traffic(
        ok=all(part.ok for part in parts),
        cells=tuple(cell for part in parts for cell in part.cells),
        parameters=parts[0].parameters,
        allowance=parts[0].allowance,  # of the same interfaces
        left_out=parts[0].left_out,
    )


def scale(stage: Stage, sizes: Sequence[int], *, steps: int, warmup: int, rounds: int, emulate: bool) -> Scaling:
    """Jobs of each size in turns, so that what slows the machine for a while slows all sizes alike."""
    k, micro_steps, planned = stage.place.ranks_per_node, cells.MICRO_STEPS, predicted.compute_per_hop2_of(sizes)
    stages = {nodes: stage.first(nodes) for nodes in sizes}
    entries = {nodes: scaling.entries(nodes, sizes, partition_size=k, micro_steps=micro_steps) for nodes in sizes}
    precision: Precision = "fp32" if stage.place.on_cpu else "bf16"
    hop2 = {nodes: hop2_bytes(entries[nodes][0], stage.shape, precision, stages[nodes].place) for nodes in sizes}
    compute = None
    if emulate:
        compute = scaling.emulated_compute_seconds(hop2, planned, stage.place, micro_steps=micro_steps)
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
            jobs[nodes].append(stages[nodes].train(config).steps)
    return Scaling(
        ranks_per_node=k,
        link_mbps=stage.place.link_mbps,
        rows=scaling.rows(
            sizes, jobs, stage.place, hop2_bytes=hop2, planned=planned, compute_seconds=compute, micro_steps=micro_steps
        ),
        caption=stage.place.caption,
        parameters=stage.shape.parameters,
        partition_size=k,
        rounds=rounds,
        steps=steps,
        emulated_compute_seconds=compute,
        notes=scaling.notes(stage.place, compute),
    )


def require_shaped(stage: Stage) -> None:
    """Raises UsageError where links cannot be shaped, as at the process level of the sandbox."""
    if stage.place.link_mbps is None:
        raise UsageError(
            "a sweep over link rates needs shaped links",
            f"the sandbox runs at level {stage.place.level}, which has none",
            next="run it as root on Linux",
        )


def crossover_job(stage: Stage, *, steps: int, warmup: int, compute_per_traffic: float | None = None) -> Job:
    """zero3 against mics; with emulated compute that is so many times what zero3's traffic needs on the link."""
    entries = cells.crossover(world_size=stage.place.world_size, devices_per_node=stage.place.ranks_per_node)
    seconds = 0.0
    if compute_per_traffic is not None:
        needed = stage.place.transfer_seconds(sent_bytes(entries[0], stage.shape, "fp32", stage.place))
        seconds = compute_per_traffic * (needed or 0.0) / entries[0].micro_steps
    return stage.train(BenchConfig(entries, warmup_steps=warmup, steps=steps, emulated_compute_seconds=seconds))


def crossover(unshaped: Job, over_links: Sequence[Job], over_compute: Sequence[Job]) -> Crossover:
    """Pure."""
    links = tuple(_link_point(job, unshaped) for job in over_links)
    compute = tuple(_compute_point(job) for job in over_compute)
    rates = sorted({job.place.link_mbps for job in (*over_links, *over_compute) if job.place.link_mbps})
    return Crossover(
        nodes=unshaped.place.nodes,
        ranks_per_node=unshaped.place.ranks_per_node,
        over_links=links,
        over_compute=compute,
        predicted=predicted.crossover(),
        stops_at=stops_at(links + compute),
        caption=f"CPU/gloo, emulated links of {', '.join(map(str, rates))} Mbit/s",
        parameters=unshaped.shape.parameters,
    )


def _link_point(job: Job, unshaped: Job) -> Point:
    seconds = median(result.seconds_by_round(unshaped.steps, job.entries[0].name).values())
    return _point(job, seconds, f"{job.place.link_mbps} Mbit/s")


def _compute_point(job: Job) -> Point:
    seconds = job.config.emulated_compute_seconds * job.entries[0].micro_steps
    return _point(job, seconds, f"{seconds:.1f} s of emulated compute at {job.place.link_mbps} Mbit/s")


def _point(job: Job, compute_seconds: float, what: str) -> Point:
    zero3, mics = job.entries
    link_seconds = job.place.transfer_seconds(sent_bytes(zero3, job.shape, job.run.precision, job.place))
    faster = result.speedup(job.steps, fast=mics.name, slow=zero3.name)
    assert link_seconds is not None  # the links of a crossover are shaped, and each entry has made its steps
    assert faster is not None
    return Point(compute_seconds / link_seconds, faster, what)
