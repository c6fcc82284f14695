"""A plan as tables. Pure."""

from __future__ import annotations

from micsctl.planner.model import Plan
from micsctl.report.table import Table, format_bytes, format_count, format_memory


def plan(plan: Plan) -> tuple[Table, ...]:
    machines, train = plan.machines, plan.train
    name = train.model if isinstance(train.model, str) else "own shape"
    size = (
        "of a size that only the nodes know"
        if plan.parameters is None
        else f"{format_count(plan.parameters)} parameters"
    )
    rows = [
        ("model", f"{name}, {size}"),
        ("machines", f"{machines.nodes} nodes x {machines.devices_per_node} {machines.device}"),
        ("strategy", train.strategy),
        ("partition size p", f"{plan.partition_size}{', hierarchical' if plan.hierarchical else ''}"),
        ("why", plan.reason),
        ("micro-batch", f"{train.micro_batch} x {train.sequence} tokens, {train.accumulation} micro-steps a step"),
        ("precision", train.precision),
        ("checkpointing", train.checkpointing),
    ]
    if plan.traffic_bytes is not None and plan.traffic_zero3_bytes is not None:
        rows.append(("traffic", f"{format_bytes(plan.traffic_bytes)} sent per node and step (by formula)"))
        rows.append(("zero3 would send", format_bytes(plan.traffic_zero3_bytes)))
    table = Table("plan", ("", " "), tuple(rows))
    return (table, _candidates(plan)) if plan.candidates else (table,)


def _candidates(plan: Plan) -> Table:
    columns = ("p", "states", "working set", "activations", "loss", "overhead", "total", "")
    rows = tuple(
        (
            str(c.partition_size),
            *map(format_memory, (c.memory.states, c.memory.working_set, c.memory.activations)),
            *map(format_memory, (c.memory.loss, c.memory.overhead, c.memory.total)),
            "chosen" if c.partition_size == plan.partition_size else "fits" if c.fits else "does not fit",
        )
        for c in plan.candidates
    )
    caption = f"predicted memory per device; planned with {format_memory(plan.memory_limit_bytes)}"
    return Table("partition sizes", columns, rows, frozenset(columns[:-1]), caption)
