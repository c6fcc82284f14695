"""up, status, topology, ssh, exec, extend, down."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from micsctl.cli.options import Options, with_flags
from micsctl.cli.session import Session
from micsctl.errors import ExitCode, UsageError
from micsctl.home import hold
from micsctl.report import clusters as shown

NodeIndex = Annotated[int, typer.Argument(help="Number of the node; 0 is the head.", min=0)]


def up(
    options: Options,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be made, make nothing.")] = False,
    ttl: Annotated[str | None, typer.Option(help="The nodes end by themselves after this, e.g. 12h.")] = None,
) -> None:
    """Bring the cluster up, or finish an earlier `up`.

    Network, placement group, nodes with EFA, SSH. Asks before it spends.
    """
    from micsctl.cluster.up import up as bring_up
    from micsctl.remote.ssh import open_hosts
    from micsctl.spec import override

    session = Session.of(options)
    spec = override(session.spec, ttl=ttl)
    session.render.table(shown.intent(spec, None if dry_run else session.sandbox, _planned(session)))
    if dry_run:
        session.render.result(
            spec.model_dump(mode="json"), text=with_flags("nothing was made\nnext: micsctl up", options)
        )
        return
    session.confirm(f"bring up {spec.cluster.nodes} x {spec.cluster.type}?")
    with hold(session.files.lock, f"cluster {spec.name!r}"):
        cluster = bring_up(session.aws, spec, session.files, report=session.render, open_hosts=open_hosts)
    session.render.result(cluster, shown.nodes(cluster), text=shown.next_lines(cluster))


def _planned(session: Session) -> str:
    """p and why, in one line; a cluster may be brought up for a model that nobody can plan for yet."""
    from micsctl.planner.plan import plan

    try:
        return plan(session.spec.train, session.machines).reason
    except UsageError as error:
        return f"open: {error.what}"


def status(options: Options) -> None:
    """Show the cluster: nodes, their state, and when they end."""
    from micsctl.cluster.status import status as look

    session = Session.of(options)
    found = look(session.aws, session.spec.name, session.spec.provider, now=datetime.now(UTC))
    tables = [shown.nodes(found.cluster)] if found.cluster else []
    session.render.result(found, *tables, text=with_flags(shown.status_lines(session.spec.name, found), options))


def topology(options: Options) -> None:
    """Ask every node what it has.

    Devices, the links between them, EFA, clock, versions; and what is wrong with it.
    """
    session = Session.of(options)
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        found = session.discover(cluster, hosts)
    findings = session.findings(cluster, found)
    answer = {"topology": found, "findings": findings}
    session.render.result(answer, *shown.topology(found), text=shown.finding_lines(findings))


def ssh(
    options: Options,
    node: NodeIndex = 0,
    command: Annotated[list[str] | None, typer.Argument(help="A command in place of a shell.")] = None,
) -> None:
    """Open a shell on a node, host keys checked."""
    from micsctl.remote.connection import require_files
    from micsctl.remote.ssh import ssh_command

    session = Session.of(options)
    cluster = session.cluster()
    target = next((n for n in cluster.nodes if n.index == node), None)
    if target is None:
        there = ", ".join(str(n.index) for n in cluster.nodes)
        raise UsageError(f"there is no node {node}", f"the cluster has nodes {there}")
    require_files(cluster, session.files)
    argv = [*ssh_command(cluster, session.files, target), *(command or [])]
    session.render.detail(" ".join(argv))
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise UsageError("the program ssh is missing", "it is not on PATH", next="install openssh-client") from None


def exec_(
    options: Options,
    command: Annotated[list[str], typer.Argument(help="The command, run with bash on every node.")],
) -> None:
    """Run a command on every node; exit code 8 where one fails."""
    from micsctl.remote import fanout

    session = Session.of(options)
    cluster = session.cluster()
    line = " ".join(command)
    with session.hosts(cluster) as hosts:
        results = fanout.each(hosts, lambda host: host.run(line, check=False, timeout_seconds=3600))
    if options.json:
        session.render.result([{"node": h.index, **vars(r)} for h, r in zip(hosts, results, strict=True)])
    for host, result in zip(hosts, results, strict=True):
        for text in () if options.json else (result.stdout + result.stderr).splitlines():
            session.render.line(f"{host.index}: {text}")
        if result.exit_code:
            session.render.note(f"exit code {result.exit_code} on {host.name}")
    sys.exit(ExitCode.JOB if any(result.exit_code for result in results) else ExitCode.DONE)


def extend(options: Options, duration: Annotated[str, typer.Argument(help="How much longer, e.g. 4h.")]) -> None:
    """Let the nodes live longer than they would."""
    from micsctl.cluster.extend import extend as lengthen
    from micsctl.duration import parse_duration

    session = Session.of(options)
    try:
        length = parse_duration(duration)
    except ValueError as error:
        raise UsageError("no duration", str(error), next="micsctl extend 4h") from None
    cluster = session.cluster()
    with session.hosts(cluster) as hosts:
        ends_at = lengthen(hosts, length, planned=cluster.ends_at)
    session.render.result({"ends_at": ends_at}, text=shown.ends_line(ends_at, ends_at - datetime.now(UTC)))


def down(options: Options) -> None:
    """Take everything down and prove that nothing is left."""
    from micsctl.cluster.down import down as take_down

    session = Session.of(options)
    session.confirm(f"take down cluster {session.spec.name!r}?")
    with hold(session.files.lock, f"cluster {session.spec.name!r}"):
        result = take_down(session.aws, session.spec.name, session.files, report=session.render)
    session.render.result(result, text="nothing is left; nothing costs money")
