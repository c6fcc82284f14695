"""plan, launch, logs, runs, stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from micsctl.cli.options import Options, with_flags
from micsctl.cli.render import RunView
from micsctl.cli.session import Session
from micsctl.errors import HealthError, Interrupted
from micsctl.home import hold
from micsctl.report import clusters as cluster_report
from micsctl.report import plans as plan_report
from micsctl.report import runs as run_report

if TYPE_CHECKING:
    from mics.config import RunConfig

    from micsctl.remote.host import Host
    from micsctl.topology.check import Finding

RunId = Annotated[str | None, typer.Argument(help="Id of the run; default: the newest.")]


def plan(options: Options) -> None:
    """Choose the partition size and say why; needs no cluster."""
    from micsctl.planner.plan import plan as make_plan

    session = Session.of(options)
    made = make_plan(session.spec.train, session.machines)
    session.render.result(made, *plan_report.plan(made))


def launch(
    options: Options,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and leave.")] = False,
    resume: Annotated[str | None, typer.Option(help="Go on from the newest whole checkpoint of this run.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="In place of the file's: mics, mics-flat, zero3, zero2, ddp.")
    ] = None,
    profile_steps: Annotated[
        str | None, typer.Option(metavar="STEP[:STEPS]", help="Record these optimizer steps in the run's folder.")
    ] = None,
    profile_memory: Annotated[
        bool, typer.Option("--profile-memory", help="And what is in the GPU's memory in them.")
    ] = False,
    skip_gate: Annotated[bool, typer.Option("--skip-gate", help="Launch on nodes that fail the checks too.")] = False,
    master_port: Annotated[int | None, typer.Option(help="TCP port of the rendezvous.", min=1, max=65535)] = None,
) -> None:
    """Train on the cluster, and watch.

    Plans for the machines that are there, ships the trainer and starts it on every node.
    """
    from micsctl.runs.code import own_code
    from micsctl.runs.launch import start
    from micsctl.runs.prepare import prepare, with_profile

    session = Session.of(options)
    train = with_profile(session.spec.train, steps=profile_steps, memory=profile_memory)
    package = own_code(train, session.folder)
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        with session.render.phase("topology"):
            topology = session.discover(cluster, hosts)
        _gate(session, session.findings(cluster, topology), skip=skip_gate)
        config = prepare(train, topology, hosts, strategy=strategy, resume=resume)
        what = f"cluster {cluster.name!r}"
        with session.render.phase(f"start run {config.run_id}"), hold(session.files.lock, what):
            start(hosts, topology, config, own_code=package, master_port=master_port)
        if detach:
            session.render.result(
                {"run_id": config.run_id}, text=with_flags(f"next: micsctl logs -f {config.run_id}", options)
            )
            return
        _watch(session, hosts, config)


def logs(
    options: Options,
    run: RunId = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[int, typer.Option(help="Whose log.", min=0)] = 0,
) -> None:
    """Show what a rank wrote, or watch a run."""
    from micsctl.runs.logs import rank_log
    from micsctl.runs.state import find_run

    session = Session.of(options)
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        found = find_run(hosts, _checked(run))
        if follow and rank == 0:
            _watch(session, hosts, found.config)
            return
        lines: list[str] = []
        rank_log(hosts, found, rank, lines.append if options.json else session.render.line, follow=follow)
    if options.json:
        session.render.result({"run_id": found.run_id, "rank": rank, "lines": lines})


def runs(options: Options) -> None:
    """List the runs that the nodes know."""
    from micsctl.runs.state import list_runs

    session = Session.of(options)
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        found = list_runs(hosts)
    summaries = [run_report.summary(run) for run in found]
    if found:
        session.render.result(summaries, run_report.table(found))
    else:
        session.render.result(summaries, text=with_flags("no run yet\nnext: micsctl launch", options))


def stop(
    options: Options,
    run: RunId = None,
    grace: Annotated[float, typer.Option(help="Seconds in which it may save a checkpoint.", min=0)] = 30,
) -> None:
    """End a run by its id: it saves a checkpoint first."""
    from micsctl.runs.state import find_run
    from micsctl.runs.stop import stop as end

    session = Session.of(options)
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        run_id = find_run(hosts, _checked(run)).run_id
        with session.render.phase(f"stop run {run_id}"):
            end(hosts, run_id, grace_seconds=grace)
        found = find_run(hosts, run_id)
    session.render.result(run_report.summary(found), text=with_flags(run_report.after_stop(found), options))


def _checked(run: str | None) -> str | None:
    from micsctl.runs.model import checked_run_id

    return checked_run_id(run) if run else None


def _gate(session: Session, findings: Sequence[Finding], *, skip: bool) -> None:
    """Raises HealthError for nodes that are not fit to train on; says what it lets pass."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors and not skip:
        why = cluster_report.finding_lines(errors)
        raise HealthError(
            "the nodes are not fit to train on", why, next="micsctl topology; --skip-gate launches anyway"
        )
    for line in cluster_report.finding_lines(findings).splitlines():
        session.render.note(f"  {line}")


def _watch(session: Session, hosts: list[Host], config: RunConfig) -> None:
    """Show the run until it ends, and say so. It goes on where only the watching ends."""
    from micsctl.remote.fanout import FanoutError
    from micsctl.remote.host import HostError
    from micsctl.runs.follow import follow

    run_id = config.run_id
    goes_on = f"run {run_id} goes on, and so does what the machines cost"
    next = f"micsctl logs -f {run_id}   or   micsctl stop {run_id}"
    view = RunView(session.render, config.train.steps)
    view.open()
    try:
        follow(hosts, run_id, view)
    except (KeyboardInterrupt, BrokenPipeError):  # or whoever read our output has seen enough
        raise Interrupted("stopped watching", costs=goes_on, next=next) from None
    except (HostError, FanoutError) as error:
        why = "\n".join([error.what, *error.why.splitlines()])
        unless = f"unless the machines are gone, {goes_on}"
        raise HostError(
            "cannot watch the run any more", why, costs=unless, next=f"micsctl status   or   {next}"
        ) from None
    finally:
        view.close()
    session.render.result({"run_id": run_id, "exit_code": 0}, text=f"run {run_id} is done")
