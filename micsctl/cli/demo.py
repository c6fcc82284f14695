"""The whole job on this machine: the same commands that a real cluster gets, one after the other."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from micsctl.cli.options import Options
from micsctl.cli.own import OwnSession, everything_ends, leftovers, require_extras, writable
from micsctl.cli.render import Render, RunView
from micsctl.errors import ExitCode, JobError, MicsctlError
from micsctl.home import Home, hold
from micsctl.report import clusters as cluster_report
from micsctl.report import demo as demo_report
from micsctl.report import plans as plan_report
from micsctl.report.curve import Curve, curve, parse_metrics

if TYPE_CHECKING:
    from mics.config import RunConfig

    from micsctl.remote.host import Host
    from micsctl.topology.model import Topology

_KILL_AFTER_STEP = 12
_KILLED_RANK = 5


def demo(
    options: Options,
    output: Annotated[Path, typer.Option(help="Folder of report.html.")] = Path("demo"),
) -> None:
    """Do the whole job on this machine, in a sandbox.

    Sandbox, up, topology, plan, training with ZeRO-3 and with MiCS, a crash and its resume, down.
    """
    from micsctl.sandbox import control
    from micsctl.spec import Spec

    render = Render(json=options.json, verbose=options.verbose, quiet=options.quiet)
    session = OwnSession(options, render, Home(Home.find().folder / "demo"), Spec())
    require_extras({"torch": "trainer", "moto": "sandbox", "matplotlib": "report"}, "the demo", "make demo")
    writable(output, "micsctl demo")
    started = time.monotonic()
    with hold(Home.find().folder / "demo.lock", "a demo"):
        with everything_ends(session, "the demo"):
            control.stop(session.home)  # of a demo that was killed a moment ago; the lock says that none is going on
            stage, zero3, mics = _train_both(session)
            comparison = demo_report.table(stage, zero3, mics)
            render.table(comparison)
            output.mkdir(parents=True, exist_ok=True)
            (output / "report.html").write_text(demo_report.html(stage, zero3, mics), encoding="utf-8")
            render.note(f"  wrote {output / 'report.html'}")
            left_in_cloud = _down(session)
        left_here = leftovers(session)
    found = demo_report.result(
        stage, zero3, mics, seconds=time.monotonic() - started, leftovers=left_in_cloud + left_here
    )
    render.note(f"  left behind: {found.leftovers}")
    render.last_line(asdict(found))
    if not found.ok:
        raise typer.Exit(ExitCode.FAILURE)


def _train_both(session: OwnSession) -> tuple[demo_report.Stage, Curve, Curve]:
    from micsctl.cluster.up import up
    from micsctl.remote.ssh import open_hosts

    render = session.render
    with render.phase("sandbox"):
        sandbox = session.sandbox
        assert sandbox is not None
    because = f" ({sandbox.note})" if sandbox.note else ""
    render.note(f"  level {sandbox.level}{because}, {cluster_report.links(sandbox)}")
    if not sandbox.shaped:
        render.note("  without shaping, bytes are counted in the trainer and seconds say nothing about networks")
    cluster = up(session.aws, session.spec, session.files, report=render, open_hosts=open_hosts)
    render.table(cluster_report.nodes(cluster))
    with session.hosts(cluster) as hosts:
        with render.phase("topology"):
            topology = session.discover(cluster, hosts)
        for table in cluster_report.topology(topology):
            render.table(table)
        chosen = _plan(session, topology)
        stage = demo_report.Stage(
            level=sandbox.level,
            shaped=sandbox.shaped,
            link_mbps=sandbox.link_mbps,
            nodes=len(cluster.nodes),
            devices=topology.devices_per_node,
            partition_size=chosen,
        )
        render.note(f"\nZeRO-3: every step gathers over all {stage.nodes * stage.devices} devices")
        zero3 = _run(session, hosts, topology, "zero3")
        render.note(f"\nMiCS: the same model in partition groups of {chosen}; one rank will be killed")
        mics = _run_with_a_crash(session, hosts, topology)
        render.note("")
    return stage, zero3, mics


def _plan(session: OwnSession, topology: Topology) -> int:
    from micsctl.planner.machines import machines_from
    from micsctl.planner.plan import plan

    made = plan(session.spec.train, machines_from(topology))
    for table in plan_report.plan(made):
        session.render.table(table)
    return made.partition_size


def _run(session: OwnSession, hosts: list[Host], topology: Topology, strategy: str) -> Curve:
    from micsctl.runs.prepare import prepare

    config = prepare(session.spec.train, topology, hosts, strategy=strategy)
    _start_and_follow(session, hosts, topology, config, RunView(session.render, config.train.steps))
    return curve(strategy, [_metrics(hosts, config)])


def _run_with_a_crash(session: OwnSession, hosts: list[Host], topology: Topology) -> Curve:
    """MiCS, one rank killed on the way, gone on from the checkpoint."""
    from micsctl.runs.prepare import prepare

    first = prepare(session.spec.train, topology, hosts, strategy="mics")
    killer = Killer(session.render, hosts, first)
    try:
        _start_and_follow(session, hosts, topology, first, killer)
    except JobError as error:
        if not killer.has_struck:
            raise
        session.render.note(f"  {error.what}")
    else:
        raise MicsctlError("the demo's crash did not happen", f"run {first.run_id} ended without it")
    session.render.note(f"  going on from the checkpoint of run {first.run_id}")
    second = prepare(session.spec.train, topology, hosts, strategy="mics", resume=first.run_id)
    _start_and_follow(session, hosts, topology, second, RunView(session.render, second.train.steps))
    return curve("mics", [_metrics(hosts, first), _metrics(hosts, second)])


class Killer(RunView):
    """Shows the run, and kills one rank after a step that lies behind a checkpoint."""

    def __init__(self, render: Render, hosts: list[Host], config: RunConfig) -> None:
        super().__init__(render, config.train.steps)
        self._hosts, self._config = hosts, config
        self.has_struck = False

    def metrics(self, line: dict[str, Any]) -> None:
        super().metrics(line)
        if line["step"] < _KILL_AFTER_STEP or self.has_struck:
            return
        self.has_struck = True
        host = next(host for host in self._hosts if host.index == self._config.node_of(_KILLED_RANK))
        self.output(f"killing rank {_KILLED_RANK} on {host.name}")
        of_the_run = f"grep -lz '^MICS_RUN_ID={self._config.run_id}$' /proc/[0-9]*/environ 2>/dev/null"
        host.run(f"kill -9 $(grep -lz '^RANK={_KILLED_RANK}$' $({of_the_run}) 2>/dev/null | cut -d/ -f3)")


def _start_and_follow(
    session: OwnSession, hosts: list[Host], topology: Topology, config: RunConfig, view: RunView
) -> None:
    from micsctl.runs.follow import follow
    from micsctl.runs.launch import start

    with session.render.phase(f"start run {config.run_id}"):
        start(hosts, topology, config)
    view.open()
    try:
        follow(hosts, config.run_id, view)
    finally:
        view.close()


def _metrics(hosts: list[Host], config: RunConfig) -> list[dict[str, Any]]:
    return parse_metrics(hosts[0].read(f".micsctl/runs/{config.run_id}/metrics.jsonl") or "")


def _down(session: OwnSession) -> int:
    """Take the cluster down; the number of resources that are still there."""
    from micsctl.aws.inventory import resources
    from micsctl.cluster.down import down

    down(session.aws, session.spec.name, session.files, report=session.render)
    return len(resources(session.aws, session.spec.name))
