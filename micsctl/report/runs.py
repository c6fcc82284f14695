"""Runs as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from micsctl.report.table import Table
from micsctl.runs.model import Run, Status


def summary(run: Run) -> dict[str, Any]:
    train = run.config.train
    return {
        "run_id": run.run_id,
        "status": run.status.value,
        "why": run.why,
        "strategy": None if run.of_benchmark else train.strategy,
        "partition_size": None if run.of_benchmark else run.config.grid.partition_size,
        "step": run.last_step,
        "steps": train.steps,
        "loss": run.last_loss,
        "skipped_in_row": run.skipped_in_row,
        "resumed_from": run.config.resume_from,
        "exit_codes": {node.index: node.exit_code for node in run.nodes},
    }


def after_stop(run: Run) -> str:
    """How a run ended that was asked to stop."""
    step = f"step {run.last_step or 0} of {run.config.train.steps}"
    if run.saved_when_stopped:
        return (
            f"run {run.run_id} has stopped at {step} and saved a checkpoint\nnext: micsctl launch --resume {run.run_id}"
        )
    if run.status is Status.DONE:
        return f"run {run.run_id} is done"
    return f"run {run.run_id} has ended at {step} without saving a checkpoint ({_ended(run)})"


def table(runs: Sequence[Run]) -> Table:
    rows = tuple(
        (
            run.run_id,
            _ended(run),
            "bench" if run.of_benchmark else run.config.train.strategy,
            "-" if run.of_benchmark else str(run.config.grid.partition_size),
            f"{run.last_step or 0}/{run.config.train.steps}",
            "-" if run.last_loss is None else f"{run.last_loss:.4f}",
        )
        for run in runs
    )
    return Table("runs", ("run", "status", "strategy", "p", "step", "loss"), rows, frozenset({"p", "step", "loss"}))


def _ended(run: Run) -> str:
    return f"{run.status.value}, {run.why}" if run.why else run.status.value
