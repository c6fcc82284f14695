"""A benchmark as a run on the nodes: made ready, started, followed, its measurements read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mics.config import RunConfig, TrainConfig

from micsctl.bench.model import Site
from micsctl.cluster.interrupts import interrupt_afterwards
from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.planner.machines import machines_from
from micsctl.planner.plan import plan
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs.follow import Watcher, follow
from micsctl.runs.launch import configure, counted_interface, start
from micsctl.runs.model import BENCHMARK, new_run_id
from micsctl.runs.stop import stop
from micsctl.topology.model import Topology

_HAS_DEEPSPEED = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"


def train_config(model: TrainConfig, *, devices_per_node: int, measurements: int) -> TrainConfig:
    """What a benchmark's run.json says of training: the model and the batch. Its strategy does not count. Pure.

    measurements  lines that metrics.jsonl will have, which is what `micsctl runs` shows as steps
    """
    return replace(
        model,
        strategy="mics",
        partition=devices_per_node,
        hierarchical=False,
        steps=measurements,
        validation=replace(model.validation, every=0),
        checkpoint=replace(model.checkpoint, every=0),
        profile=replace(model.profile, first_step=0),
    )


def prepare(model: TrainConfig, topology: Topology, *, measurements: int) -> RunConfig:
    """run.json for these machines, each `auto` answered."""
    machines = machines_from(topology)
    train = train_config(model, devices_per_node=machines.devices_per_node, measurements=measurements)
    return configure(plan(train, machines), topology, new_run_id(BENCHMARK))


def run(
    hosts: Sequence[Host],
    topology: Topology,
    config: RunConfig,
    *,
    program: str,
    files: Mapping[str, str],
    watcher: Watcher,
) -> list[dict[str, Any]]:
    """Run `program` on these nodes to its end; the lines of its metrics.jsonl.

    Raises what `start` and `follow` raise. Whatever ends it early, Ctrl-C too, ends the run on the nodes as well.
    """
    by_index = {host.index: host for host in hosts}
    ordered = [by_index[node.index] for node in topology.nodes]
    start(ordered, topology, config, program=program, files=files)
    try:
        follow(ordered, config.run_id, watcher)
    except (JobError, UsageError) as error:  # it has ended already; going on from a checkpoint is not for benchmarks
        error.next = f"micsctl logs {config.run_id}"
        raise
    except BaseException:
        with interrupt_afterwards(), suppress(MicsctlError):
            stop(ordered, config.run_id, grace_seconds=10)
        raise
    text = ordered[0].read(f".micsctl/runs/{config.run_id}/metrics.jsonl") or ""
    return [json.loads(line) for line in text.splitlines()]


def site_of(hosts: Sequence[Host], topology: Topology, *, level: str, link_mbps: int | None) -> Site:
    """Where it runs; asks the nodes for the MTU of the interface whose counters they read, where they read one."""
    machines, interface = machines_from(topology), counted_interface(topology)
    mtu = min(_numbers(hosts, f"cat /sys/class/net/{interface}/mtu")) if interface else None
    free_kib = min(_numbers(hosts, "awk '/^MemAvailable/ {print $2}' /proc/meminfo"))
    return Site(machines.nodes, machines.devices_per_node, level, link_mbps, mtu, machines.device, 1024 * free_kib)


def _numbers(hosts: Sequence[Host], question: str) -> list[int]:
    return fanout.each(hosts, lambda host: int(host.run(question).stdout))


def has_deepspeed(hosts: Sequence[Host]) -> bool:
    """Whether every node's Python has it."""
    question = f'.micsctl/python -c "{_HAS_DEEPSPEED}"'
    return all(answer.exit_code == 0 for answer in fanout.each(hosts, lambda host: host.run(question, check=False)))
