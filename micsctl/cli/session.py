"""What a command works with: the spec, the laptop's files, AWS, and the nodes, each made when first needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from micsctl.cli.options import Options
from micsctl.cli.render import Render
from micsctl.errors import UsageError
from micsctl.home import ClusterFiles, Home

if TYPE_CHECKING:
    from micsctl.aws.session import Aws
    from micsctl.aws.settings import AwsSettings
    from micsctl.cluster.model import Cluster
    from micsctl.planner.model import Machines
    from micsctl.remote.host import Host
    from micsctl.sandbox.control import SandboxInfo
    from micsctl.spec import Spec
    from micsctl.topology.check import Finding
    from micsctl.topology.model import Topology


@dataclass(frozen=True)
class Session:
    """One invocation. `Session.of(options)` is where every command begins."""

    options: Options
    render: Render
    home: Home
    ends_with_command: ClassVar[bool] = False  # the sandbox

    @classmethod
    def of(cls, options: Options) -> Session:
        render = Render(json=options.json, verbose=options.verbose, quiet=options.quiet)
        return cls(options, render, Home.find())

    @cached_property
    def file(self) -> Path | None:
        """mics.yaml; None where there is none, and the defaults hold."""
        return self.options.config or _find_file()

    @property
    def folder(self) -> Path:
        """Where mics.yaml lies, and beside it a model of the user's own."""
        return self.file.parent if self.file else Path.cwd()

    @cached_property
    def spec(self) -> Spec:
        """Flag > MICSCTL_* > file > AWS_REGION > default."""
        from micsctl import spec as specs

        spec = specs.load(self.file) if self.file else specs.Spec()
        said_in_file = "region" in spec.cluster.model_fields_set
        region = self.options.region or (None if said_in_file else os.environ.get("AWS_REGION"))
        return specs.override(spec, name=self.options.name, region=region)

    @cached_property
    def files(self) -> ClusterFiles:
        return self.home.cluster(self.spec.provider, self.spec.name)

    @cached_property
    def sandbox(self) -> SandboxInfo | None:
        """The sandbox, started on first use; None for a real provider."""
        if self.spec.provider != "sandbox":
            return None
        from micsctl.cluster.interrupts import interrupt_afterwards
        from micsctl.sandbox import control

        with interrupt_afterwards():  # a server that is just starting could not be found, and so not be stopped
            return control.ensure(self.home, self.spec.sandbox, self.spec.cluster.ssh_user, mine=self.ends_with_command)

    @cached_property
    def settings(self) -> AwsSettings:
        from micsctl.aws.settings import AwsSettings

        if self.sandbox:
            return self.sandbox.settings
        cluster = self.spec.cluster
        return AwsSettings(region=cluster.region, profile=self.options.profile, ssh_user=cluster.ssh_user)

    @cached_property
    def aws(self) -> Aws:
        from micsctl.aws.session import connect

        return connect(self.settings)

    @cached_property
    def machines(self) -> Machines:
        """Facts for a plan before the machines exist."""
        from micsctl.planner.machines import machines_of

        return machines_of(self.spec)

    def cluster(self) -> Cluster:
        """The running cluster. Raises UsageError where there is none."""
        from micsctl.cluster.find import find

        cluster = find(self.aws, self.spec.name, self.spec.provider)
        if not cluster:
            raise UsageError(f"there is no cluster {self.spec.name!r}", next="micsctl up")
        return cluster

    @contextmanager
    def hosts(self, cluster: Cluster) -> Iterator[list[Host]]:
        from micsctl.remote.ssh import open_hosts

        with open_hosts(cluster, self.files) as hosts:
            yield hosts

    def discover(self, cluster: Cluster, hosts: list[Host]) -> Topology:
        from micsctl.aws.topology import network_nodes
        from micsctl.topology.discover import discover
        from micsctl.topology.model import CpuDevices

        cpu = CpuDevices(self.sandbox.devices_per_node, self.sandbox.device_memory_bytes) if self.sandbox else None
        switches = network_nodes(self.aws, [node.instance_id for node in cluster.nodes])
        return discover(cluster, hosts, cpu_devices=cpu, network_nodes=switches)

    def findings(self, cluster: Cluster, topology: Topology) -> tuple[Finding, ...]:
        """What is wrong with the nodes, measured against mics.yaml and what their type should have."""
        from micsctl.aws.types import find_type
        from micsctl.topology.check import check

        nodes = self.spec.cluster.nodes
        if self.sandbox:  # its devices are processes: no GPU and no EFA is to be expected
            return check(topology, nodes_expected=nodes, efa_devices_expected=0)
        type = find_type(self.aws, cluster.instance_type)
        efa_devices = len(type.efa_cards)
        return check(topology, nodes_expected=nodes, efa_devices_expected=efa_devices, devices_expected=type.gpus)

    def confirm(self, question: str) -> None:
        """Ask on a terminal; elsewhere a missing --yes is an error that names the flag."""
        if self.options.yes or self.sandbox:
            return
        if self.options.no_input or not sys.stdin.isatty():
            raise UsageError("this costs money and nobody can be asked", "there is no terminal", next="add --yes")
        if not self.render.confirm(question):
            raise UsageError("not confirmed", "nothing was done")


def _find_file() -> Path | None:
    from micsctl.spec import find_file

    try:
        return find_file(Path.cwd())
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", "it was removed", next="cd") from None
