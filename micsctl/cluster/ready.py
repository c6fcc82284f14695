"""From "running" to "ready": host keys, login, bootstrap."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from micsctl.aws.instances import console_output
from micsctl.aws.session import Aws
from micsctl.cluster.model import Cluster, Node
from micsctl.cluster.progress import Progress
from micsctl.errors import MicsctlError
from micsctl.home import ClusterFiles
from micsctl.remote.fanout import each
from micsctl.remote.host import Host, HostError, HostKeyError, LoginError
from micsctl.remote.hostkeys import HostKey, known_hosts_of, known_name, parse_console, write_known_hosts

_READY = ".micsctl/ready"
_LOG = ".micsctl/bootstrap.log"


def ensure_known_hosts(
    aws: Aws, cluster: Cluster, files: ClusterFiles, *, nitro: bool, deadline: float, report: Progress
) -> None:
    """Fill the cluster's known_hosts from the consoles of its nodes, unless it names every node already.

    `deadline` is a value of time.monotonic(). Raises MicsctlError when a console shows no host keys until then.
    """
    if _names_all(files, cluster):
        return
    keys: dict[str, list[HostKey]] = {}
    while True:
        for node in cluster.nodes:
            if not keys.get(node.instance_id):
                keys[node.instance_id] = parse_console(console_output(aws, node.instance_id, latest=nitro))
        silent = [node for node in cluster.nodes if not keys[node.instance_id]]
        if not silent:
            break
        report.note(f"{len(cluster.nodes) - len(silent)} of {len(cluster.nodes)} consoles show their host keys")
        if time.monotonic() > deadline:
            raise MicsctlError(
                "could not learn the host keys of the nodes",
                "\n".join(f"{node.name}: no host keys on its console" for node in silent),
            )
        time.sleep(aws.settings.poll_seconds)
    write_known_hosts(files.known_hosts, known_hosts_of(cluster, keys))


def _names_all(files: ClusterFiles, cluster: Cluster) -> bool:
    if not files.known_hosts.exists():
        return False
    lines = files.known_hosts.read_text(encoding="ascii", errors="replace").splitlines()
    known = {line.split(" ", 1)[0] for line in lines}
    return all(known_name(address, cluster.ssh_port) in known for node in cluster.nodes for address in _ways(node))


def _ways(node: Node) -> list[str]:
    return [address for address in (node.private_ip, node.public_ip) if address]


@dataclass(frozen=True)
class NodeState:
    """How far a node has come: port, login, bootstrap, ready; `detail` says what it waits for or why it failed."""

    name: str
    stage: str
    detail: str


def wait_ready(
    hosts: Sequence[Host],
    *,
    every_seconds: float,
    deadline: float,
    report: Progress,
    check_alive: Callable[[], None],
) -> None:
    """Until every node's bootstrap has said `ok`.

    `check_alive` is called between two looks and raises where a node has ended. `deadline` is a value of
    time.monotonic(). Raises MicsctlError with one line per node that failed or was too late, and HostKeyError at once.
    """
    while True:
        states = each(hosts, look)
        waiting = [state for state in states if state.stage != "ready"]
        if not waiting:
            return
        report.note(f"{len(states) - len(waiting)} of {len(states)} ready; {waiting[0].name}: {waiting[0].detail}")
        failed = [state for state in waiting if state.stage == "failed"]
        if failed:
            raise MicsctlError(f"the bootstrap failed on {len(failed)} of {len(states)} nodes", _lines(failed))
        if time.monotonic() > deadline:
            raise MicsctlError(f"{len(waiting)} of {len(states)} nodes did not become ready in time", _lines(waiting))
        check_alive()
        time.sleep(every_seconds)


def look(host: Host) -> NodeState:
    """Raises HostKeyError; anything else that keeps a node from answering is a state of its own."""
    try:
        answer = host.read(_READY)
        if answer is None:
            last = host.run(f"tail -n 1 {_LOG} 2>/dev/null", check=False).stdout.strip()
            return NodeState(host.name, "bootstrap", last or "the bootstrap has not begun")
    except HostKeyError:
        raise
    except LoginError as error:
        return NodeState(host.name, "login", _short(error))
    except HostError as error:
        return NodeState(host.name, "port", _short(error))
    if answer.strip() == "ok":
        return NodeState(host.name, "ready", "")
    return NodeState(host.name, "failed", answer.strip())


def _lines(states: Sequence[NodeState]) -> str:
    return "\n".join(f"{state.name}: {state.stage}: {state.detail}" for state in states)


def _short(error: HostError) -> str:
    return error.why.splitlines()[0] if error.why else error.what
