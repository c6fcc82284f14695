"""A plan as tables. Pure."""

from __future__ import annotations

from micsctl.planner.model import Plan
from micsctl.report.table import Table, format_bytes, format_count, format_memory


def plan(plan: Plan) -> tuple[Table, Table]:
    machines, train = plan.machines, plan.train
    name = train.model if isinstance(train.model, str) else "own shape"
    rows = (
        ("model", f"{name}, {format_count(plan.parameters)} parameters"),
        ("machines", f"{machines.nodes} nodes x {machines.devices_per_node} {machines.device}"),
        ("strategy", train.strategy),
        ("partition size p", f"{plan.partition_size}{', hierarchical' if plan.hierarchical else ''}"),
        ("why", plan.reason),
        ("micro-batch", f"{train.micro_batch} x {train.sequence} tokens, {train.accumulation} micro-steps a step"),
        ("precision", train.precision),
        ("traffic", f"{format_bytes(plan.traffic_bytes)} sent per node and step (by formula)"),
        ("zero3 would send", format_bytes(plan.traffic_zero3_bytes)),
    )
    return Table("plan", ("", " "), rows), _candidates(plan)


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
