"""Where a benchmark runs: on the cluster of mics.yaml where that is up, else in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from micsctl.cli.own import OwnSession, everything_ends, leftovers, require_extras
from micsctl.cli.render import BenchView, Render
from micsctl.cli.session import Session
from micsctl.errors import Interrupted, JobError, MicsctlError, UsageError
from micsctl.home import Home, hold
from micsctl.report import bench as shown
from micsctl.report import clusters as cluster_report

if TYPE_CHECKING:
    from mics.config import TrainConfig

    from micsctl.bench.testbed import Testbed
    from micsctl.cluster.model import Cluster
    from micsctl.remote.host import Host

_WHAT = "the benchmark"


@dataclass(frozen=True)
class Wish:
    """What the command line says of a sandbox of the benchmark's own; None where it says nothing."""

    nodes: int | None = None
    devices_per_node: int | None = None
    link_mbps: int | None = None

    @property
    def flags(self) -> str:
        asked = (
            ("--nodes", self.nodes),
            ("--devices-per-node", self.devices_per_node),
            ("--link-mbps", self.link_mbps),
        )
        return ", ".join(flag for flag, value in asked if value is not None)


def running(session: Session) -> Cluster | None:
    """The cluster of mics.yaml; None where a sandbox of the benchmark's own takes its site.

    Raises UsageError for a real provider without a cluster.
    """
    from micsctl.cluster.find import find
    from micsctl.sandbox import control

    if session.spec.provider != "sandbox":
        return session.cluster()
    if control.status(session.home) is None:
        return None
    return find(session.aws, session.spec.name, session.spec.provider)


@contextmanager
def on_cluster(session: Session, cluster: Cluster, wish: Wish, model: TrainConfig) -> Iterator[Testbed]:
    """On the cluster of mics.yaml. Raises UsageError for a wish about a sandbox of the benchmark's own."""
    if wish.flags:
        why = f"cluster {cluster.name!r} is up, and benchmarks run there"
        raise UsageError(f"{wish.flags}: not on a cluster that is up", why, next="micsctl down, or leave them out")
    sandbox = session.sandbox
    level, link = (sandbox.level, sandbox.link_mbps) if sandbox else (session.spec.provider, None)
    goes_on = f"cluster {cluster.name!r} goes on, and so does what it costs"
    try:
        with session.hosts(cluster) as hosts:
            yield _testbed(session, cluster, hosts, model, level=level, link_mbps=link)
    except KeyboardInterrupt:
        raise Interrupted(f"{_WHAT} was stopped by Ctrl-C", costs=goes_on, next="micsctl status") from None
    except JobError as error:
        error.costs = error.costs or goes_on
        raise


@contextmanager
def in_own_sandbox(
    session: Session, model: TrainConfig, *, nodes: int, devices_per_node: int, link_mbps: int | None
) -> Iterator[Testbed]:
    """In a sandbox of its own, of which nothing is left afterwards. link_mbps: None = not shaped."""
    from micsctl.cluster.up import up
    from micsctl.remote.ssh import open_hosts
    from micsctl.sandbox import control
    from micsctl.spec import ClusterSpec, SandboxSpec, Spec

    require_extras({"torch": "trainer", "moto": "sandbox", "matplotlib": "report"}, _WHAT, "make setup")
    spec = Spec(
        name="bench",
        cluster=ClusterSpec(nodes=nodes),
        sandbox=SandboxSpec(devices_per_node=devices_per_node, links="none", link_mbps=link_mbps),
    )
    home = Home.find().folder
    own = OwnSession(session.options, session.render, Home(home / "bench"), spec)
    with hold(home / "bench.lock", _WHAT):
        with everything_ends(own, _WHAT):
            with own.render.phase("sandbox"):
                control.stop(own.home)  # of a benchmark that was killed; the lock says that none is going on
                sandbox = own.sandbox
                assert sandbox is not None
            own.render.note(f"  level {sandbox.level}, {cluster_report.links(sandbox)}")
            cluster = up(own.aws, own.spec, own.files, report=own.render, open_hosts=open_hosts)
            with own.hosts(cluster) as hosts:
                yield _testbed(own, cluster, hosts, model, level=sandbox.level, link_mbps=sandbox.link_mbps)
        if leftovers(own):
            raise MicsctlError("something of the benchmark's sandbox is left", "it is listed above")


def _testbed(
    session: Session, cluster: Cluster, hosts: list[Host], model: TrainConfig, *, level: str, link_mbps: int | None
) -> Testbed:
    from micsctl.bench.job import site_of
    from micsctl.bench.testbed import Testbed

    with session.render.phase("topology"):
        topology = session.discover(cluster, hosts)
    site = site_of(hosts, topology, level=level, link_mbps=link_mbps)
    return Testbed(hosts, topology, site, model, isinstance(session, OwnSession), partial(_watch, session.render))


@contextmanager
def _watch(render: Render, program: str, measurements: int) -> Iterator[BenchView]:
    from micsctl.bench.testbed import MEASURE

    view = BenchView(render, measurements, shown.measure_words if program == MEASURE else shown.step_words)
    view.open()
    try:
        yield view
    finally:
        view.close()
