"""From the train section and the machines that are there to run.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mics.config import RunConfig, TrainConfig
from mics.strategies import STRATEGIES, free_partition

from micsctl.errors import UsageError
from micsctl.planner.machines import machines_from
from micsctl.planner.model import Plan
from micsctl.planner.plan import plan
from micsctl.remote.host import Host
from micsctl.runs.launch import configure
from micsctl.runs.model import checked_run_id, new_run_id
from micsctl.runs.shared import require_shared
from micsctl.runs.state import find_run
from micsctl.topology.model import Topology

TRIAL_SECONDS = 60.0


def prepare(
    train: TrainConfig,
    topology: Topology,
    hosts: Sequence[Host],
    *,
    strategy: str | None = None,
    resume: str | None = None,
) -> RunConfig:
    """Plan for these machines and answer every `auto`.

    strategy  in place of the file's; what the file says of p, hierarchy and resharding holds only where the strategy
              leaves it open
    resume    id of a run; the new run goes on from its newest whole checkpoint

    Raises UsageError for an unknown strategy or run, for a plan that does not fit, and for checkpoints that would end
    with the nodes.
    """
    train = _with_strategy(train, strategy) if strategy else train
    # the folder of the earlier run's checkpoints: the trainer takes the newest whole one
    resume_from = find_run(hosts, checked_run_id(resume)).config.checkpoint_folder if resume else None
    made = plan(train, machines_from(topology))
    if train.checkpoint.every:
        require_shared(hosts, train.checkpoint.path)
    run_id, trial = new_run_id(train.strategy), trial_seconds(train, made)
    return configure(made, topology, run_id, trial_seconds=trial, resume_from=resume_from)


def trial_seconds(asked: TrainConfig, made: Plan) -> float:
    """How long the run compares hierarchical with flat collectives before it trains.

    Only where nobody has decided, and on GPUs: in theory the hierarchy can lose there, once p is many nodes. Pure.
    """
    undecided = asked.hierarchical == "auto" and made.hierarchical
    return TRIAL_SECONDS if undecided and made.machines.device != "cpu" else 0.0


def with_profile(train: TrainConfig, *, steps: str | None, memory: bool) -> TrainConfig:
    """With what the command line says of the profiler's window: `STEP` or `STEP:STEPS`. Raises UsageError. Pure."""
    profile = train.profile
    if steps:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", steps)
        if not found:
            raise UsageError(
                f"{steps!r} is no window of steps", "", next="--profile-steps 10   or   --profile-steps 10:3"
            )
        profile = replace(profile, first_step=int(found[1]), steps=int(found[2] or profile.steps))
    if memory and not profile.first_step:
        raise UsageError("--profile-memory needs a window of steps", "", next="--profile-steps 10 --profile-memory")
    if profile.first_step > train.steps:
        raise UsageError(f"step {profile.first_step} does not come", f"the run has {train.steps} steps")
    return replace(train, profile=replace(profile, memory=profile.memory or memory))


def _with_strategy(train: TrainConfig, strategy: str) -> TrainConfig:
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}", f"known: {', '.join(STRATEGIES)}")
    return replace(
        train,
        strategy=strategy,  # type: ignore[arg-type]  # checked against the same names just above
        partition=train.partition if free_partition(strategy) else "auto",
        hierarchical=train.hierarchical if strategy == "mics" else "auto",
        reshard_after_forward="auto" if strategy in ("zero2", "ddp") else train.reshard_after_forward,
    )
