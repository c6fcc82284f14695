"""From the train section and the machines that are there to run.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mics.config import RunConfig, TrainConfig
from mics.strategies import STRATEGIES, free_partition

from micsctl.errors import UsageError
from micsctl.planner.machines import machines_from
from micsctl.planner.plan import plan
from micsctl.remote.host import Host
from micsctl.runs.launch import configure
from micsctl.runs.model import checked_run_id, new_run_id
from micsctl.runs.state import find_run
from micsctl.topology.model import Topology


def prepare(
    train: TrainConfig,
    topology: Topology,
    hosts: Sequence[Host],
    *,
    strategy: str | None = None,
    resume: str | None = None,
) -> RunConfig:
    """Plan for these machines and answer every `auto`.

    strategy  in place of the file's; what the file says of p and hierarchy holds only where the strategy leaves it open
    resume    id of a run; the new run goes on from its newest whole checkpoint

    Raises UsageError for an unknown strategy or run, and for a plan that does not fit.
    """
    train = _with_strategy(train, strategy) if strategy else train
    # the folder of the earlier run's checkpoints: the trainer takes the newest whole one
    resume_from = find_run(hosts, checked_run_id(resume)).config.checkpoint_folder if resume else None
    made = plan(train, machines_from(topology))
    return configure(made, topology, new_run_id(train.strategy), resume_from=resume_from)


def _with_strategy(train: TrainConfig, strategy: str) -> TrainConfig:
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}", f"known: {', '.join(STRATEGIES)}")
    return replace(
        train,
        strategy=strategy,  # type: ignore[arg-type]  # checked against the same names just above
        partition=train.partition if free_partition(strategy) else "auto",
        hierarchical=train.hierarchical if strategy == "mics" else "auto",
    )
