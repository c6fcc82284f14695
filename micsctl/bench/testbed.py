"""Nodes to run benchmarks on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from mics.config import Precision, RunConfig, TrainConfig
from mics.entries import BenchConfig, Entry
from mics.probes import MeasureConfig
from mics.shapes import ModelShape

from micsctl.bench.collectives import measurements
from micsctl.bench.formula import together
from micsctl.bench.job import prepare, run
from micsctl.bench.model import Site
from micsctl.bench.result import Step, steps_of
from micsctl.remote.host import Host
from micsctl.runs.follow import Watcher
from micsctl.topology.model import Topology

BENCH, MEASURE = "mics.bench", "mics.measure"
# shows a program that writes so many measurements
Watch = Callable[[str, int], AbstractContextManager[Watcher]]


@dataclass(frozen=True)
class Testbed:
    """Nodes, what trains on them, and who is told.

    own  a sandbox of the benchmark's own, which can be had again with other links
    """

    hosts: Sequence[Host]
    topology: Topology
    site: Site
    model: TrainConfig
    own: bool
    watch: Watch

    @property
    def shape(self) -> ModelShape:
        shape = self.model.shape
        assert shape is not None  # checked where the command line was read
        return shape

    @property
    def precision(self) -> Precision:
        """That these devices train in."""
        return self._prepare(1).precision

    def first(self, nodes: int) -> Testbed:
        """The first so many nodes of it."""
        topology = replace(self.topology, nodes=self.topology.nodes[:nodes])
        return replace(self, topology=topology, site=replace(self.site, nodes=nodes))

    def train(self, config: BenchConfig) -> Job:
        """Run mics.bench: all entries at once in memory where they fit, so that they take turns step by step."""
        run_config = self._prepare(len(config.entries) * (config.warmup_steps + config.steps))
        at_once = together(
            config.entries, self.shape, run_config.precision, self.site, device_bytes=self.topology.device_memory_bytes
        )
        config = replace(config, together=at_once)
        lines = self._run(run_config, BENCH, {"bench.json": config.to_json()})
        return Job(self.site, self.shape, run_config, config, tuple(steps_of(lines)))

    def measure(self, config: MeasureConfig) -> list[dict[str, Any]]:
        """Run mics.measure; the lines that it wrote."""
        run_config = self._prepare(measurements(config, self.site))
        return self._run(run_config, MEASURE, {"measure.json": config.to_json()})

    def _prepare(self, count: int) -> RunConfig:
        return prepare(self.model, self.topology, measurements=count)

    def _run(self, config: RunConfig, program: str, files: Mapping[str, str]) -> list[dict[str, Any]]:
        with self.watch(program, config.train.steps) as watcher:
            return run(self.hosts, self.topology, config, program=program, files=files, watcher=watcher)


@dataclass(frozen=True)
class Job:
    """One run of mics.bench that has ended."""

    site: Site
    shape: ModelShape
    run: RunConfig
    config: BenchConfig
    steps: tuple[Step, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.config.entries
