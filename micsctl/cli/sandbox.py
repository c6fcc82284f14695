"""sandbox start, status, stop, fault."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from micsctl.cli.options import Options
from micsctl.cli.session import Session
from micsctl.errors import ExitCode, UsageError
from micsctl.report.clusters import links

if TYPE_CHECKING:
    from micsctl.sandbox.control import SandboxInfo
    from micsctl.sandbox.faults import Fault
    from micsctl.sandbox.state import Leftovers


def _public(info: SandboxInfo) -> dict[str, Any]:
    """What may be shown: everything but the key."""
    shown = asdict(info)
    shown["settings"] = {"endpoint_url": info.settings.endpoint_url, "region": info.settings.region}
    return shown


def _line(info: SandboxInfo) -> str:
    return f"sandbox runs: level {info.level}, {links(info)}, {info.devices_per_node} devices a node, pid {info.pid}"


def start(options: Options) -> None:
    """Start the sandbox (any command does so on first use)."""
    from micsctl.sandbox import control

    session = Session.of(options)
    info = control.ensure(session.home, session.spec.sandbox, session.spec.cluster.ssh_user)
    session.render.result(_public(info), text=_line(info))


def status(options: Options) -> None:
    """Say whether a sandbox runs, and what it is."""
    from micsctl.sandbox import control

    session = Session.of(options)
    info = control.status(session.home)
    session.render.result(_public(info) if info else None, text=_line(info) if info else "no sandbox runs")


def stop(options: Options) -> None:
    """End the sandbox with all in it; prove that nothing is left."""
    from micsctl.sandbox import control

    session = Session.of(options)
    left = control.stop(session.home)
    here = left.total - len(left.resources)  # emulated resources that were left end with the emulator
    session.render.result(left.as_json(), text="\n".join(_after_stop(left)))
    if here:
        raise typer.Exit(ExitCode.FAILURE)


def _times(left: int | None) -> str:
    if left is None:
        return "every time"
    return f"{left} more {'time' if left == 1 else 'times'}" if left else "used up"


def _fault_line(fault: Fault) -> str:
    where = f" in {fault.zone}" if fault.zone else f" of {fault.instance}" if fault.instance else ""
    when = _times(fault.times)
    if fault.ends_at and fault.times != 0:
        when = f"at {datetime.fromtimestamp(fault.ends_at, UTC):%H:%M:%S} UTC"
    return f"{fault.action} -> {fault.code}{where}: {when}"


def _instance(session: Session, index: int) -> str:
    """The id of a node of the running cluster."""
    nodes = {node.index: node.instance_id for node in session.cluster().nodes}
    if index not in nodes:
        raise UsageError(f"there is no node {index}", f"the cluster has nodes {', '.join(map(str, nodes))}")
    return nodes[index]


def _after_stop(left: Leftovers) -> list[str]:
    lines = [f"{len(left.resources)} emulated resources ended with it"] if left.resources else []
    kept = [
        f"left behind: {kind}: {name}" for kind, names in asdict(left).items() if kind != "resources" for name in names
    ]
    return lines + (kept or ["no sandbox runs; nothing is left on this machine"])


def fault(
    options: Options,
    action: Annotated[str | None, typer.Argument(help="EC2 action, e.g. RunInstances.")] = None,
    code: Annotated[str | None, typer.Argument(help="Error code, e.g. InsufficientInstanceCapacity.")] = None,
    zone: Annotated[str | None, typer.Option(help="Only in this zone.")] = None,
    times: Annotated[int | None, typer.Option(help="How often; default: until cleared.", min=1)] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Of DelayedVisibility (2) and SpotInterruption (120).", min=0)
    ] = None,
    node: Annotated[int | None, typer.Option(help="SpotInterruption of this node only.", min=0)] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take all faults away.")] = False,
) -> None:
    """Make the emulated EC2 fail on purpose, or list what is set."""
    from micsctl.sandbox import control
    from micsctl.sandbox.faults import SPOT_INTERRUPTION, Fault

    session = Session.of(options)
    if clear:
        control.clear_faults(session.home)
    elif action and code:
        if node is not None and code != SPOT_INTERRUPTION:
            raise UsageError("--node goes with SpotInterruption only", f"{code} is an answer of the API")
        instance = None if node is None else _instance(session, node)
        control.inject(session.home, Fault(action, code, zone, times, seconds=seconds, instance=instance))
    elif action:
        raise UsageError(
            "a fault needs an action and a code", "", next="micsctl sandbox fault RunInstances VcpuLimitExceeded"
        )
    faults = control.faults(session.home)
    lines = [_fault_line(fault) for fault in faults]
    session.render.result(faults, text="\n".join(lines) or "no faults are set")
