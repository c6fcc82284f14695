"""Start a run on every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from mics.config import RunConfig

from micsctl import resources
from micsctl.errors import MicsctlError, UsageError
from micsctl.planner.model import Plan
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.runs import code
from micsctl.runs.environment import environment
from micsctl.runs.model import Status
from micsctl.runs.state import list_runs
from micsctl.runs.stop import stop
from micsctl.topology.model import NodeFacts, Topology

TRAINER = "mics.train"
_FREE_PORT = (
    "import socket,sys; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
    " s.bind(('', int(sys.argv[1]))); print(s.getsockname()[1])"
)


def configure(
    plan: Plan, topology: Topology, run_id: str, *, trial_seconds: float = 0.0, resume_from: str | None = None
) -> RunConfig:
    """The run.json of a plan on these machines. Pure.

    trial_seconds  how long hierarchical and flat collectives may be compared at the start
    resume_from    folder with the checkpoints to go on from
    """
    names = {node.index: node.instance_id for node in topology.nodes}
    return RunConfig(
        run_id=run_id,
        train=plan.train,
        nodes=len(topology.nodes),
        devices_per_node=topology.devices_per_node,
        node_order=tuple(node.index for node in topology.nodes),
        node_names=tuple(names.get(index, "") for index in range(max(names) + 1)),
        trial_seconds=trial_seconds,
        interface=counted_interface(topology),
        resume_from=resume_from,
    )


def counted_interface(topology: Topology) -> str | None:
    """The network interface whose counters give the traffic; None where none does. Pure.

    EFA passes the kernel by, and what nodes send to themselves is no traffic: no counter says anything there. It must
    have one name everywhere.
    """
    uncounted = any(node.interface == "lo" or node.efa_devices for node in topology.nodes)
    interfaces = {node.interface for node in topology.nodes}
    return None if uncounted or len(interfaces) > 1 else interfaces.pop()


def start(
    hosts: Sequence[Host],
    topology: Topology,
    config: RunConfig,
    *,
    program: str = TRAINER,
    files: Mapping[str, str] | None = None,
    own_code: Path | None = None,
    master_port: int | None = None,
) -> None:
    """Ship the code, write the run's folder and start it detached on every node, or on none.

    program   module that each rank runs, with `--config RUN_FOLDER/run.json`
    files     what lies beside run.json, by name
    own_code  the user's package with the model, sent along (`code.own_code`)

    Raises UsageError when a run is still going on these nodes (its devices are taken) or the port is in use.
    """
    by_index = {host.index: host for host in hosts}
    ordered = [by_index[node.index] for node in topology.nodes]
    _refuse_second_run(hosts)
    port = _port(ordered[0], master_port)
    packages = {code.content_hash(package): package for package in (resources.trainer(), own_code) if package}

    def ship(host: Host) -> None:
        for code_hash, package in packages.items():
            code.ship(host, package, code_hash)

    fanout.each(ordered, ship)
    scripts = {
        node.index: start_script(config, topology, rank, port=port, code_hashes=tuple(packages), program=program)
        for rank, node in enumerate(topology.nodes)
    }
    folder = f".micsctl/runs/{config.run_id}"

    def prepare(host: Host) -> None:
        for name, text in {**(files or {}), "run.json": config.to_json()}.items():
            host.write(f"{folder}/{name}", text)
        host.write(f"{folder}/start.sh", scripts[host.index])

    def detach(host: Host) -> None:
        host.run(f"cd {folder} && {{ setsid bash start.sh </dev/null >/dev/null 2>&1 & echo $! >pid; }}")

    fanout.each(ordered, prepare)
    try:
        fanout.each(ordered, detach)
    except BaseException:
        with suppress(MicsctlError):  # from the node that failed already; the first error tells more
            stop(ordered, config.run_id, grace_seconds=2)
        raise


def start_script(
    config: RunConfig,
    topology: Topology,
    rank: int,
    *,
    port: int,
    code_hashes: Sequence[str],
    program: str = TRAINER,
) -> str:
    """start.sh of the node with this place in the launch order. Rendezvous is static, on private addresses.

    code_hashes  of the trainer first: nobody's package may take the place of one of its modules
    """
    node: NodeFacts = topology.nodes[rank]
    templates = Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return templates.get_template("start.sh.j2").render(
        run_id=config.run_id,
        program=program,
        python_path=":".join(f"$HOME/.micsctl/code/{code_hash}" for code_hash in code_hashes),
        environment=environment(node),
        node_index=node.index,
        nodes=config.nodes,
        node_rank=rank,
        devices_per_node=config.devices_per_node,
        master_address=topology.nodes[0].private_ip,
        master_port=port,
        local_address=node.private_ip,
    )


def _refuse_second_run(hosts: Sequence[Host]) -> None:
    running = next((run for run in list_runs(hosts) if run.status is Status.RUNNING), None)
    if running:
        raise UsageError(
            f"run {running.run_id} is still going on this cluster",
            "its devices are taken",
            next=f"micsctl logs -f {running.run_id}   or   micsctl stop {running.run_id}",
        )


def _port(head: Host, wanted: int | None) -> int:
    """A free TCP port on the head node; the one asked for, or any."""
    question = f'.micsctl/python -c "{_FREE_PORT}" {wanted or 0}'
    answer = head.run(question, check=wanted is None)
    if answer.exit_code == 0:
        return int(answer.stdout)
    holder = head.run(f"ss -Hltnp 'sport = :{wanted}' 2>/dev/null", check=False).stdout.strip()
    raise UsageError(
        f"cannot listen on port {wanted} of {head.name}",
        "\n".join([*answer.stderr.strip().splitlines()[-1:], *holder.splitlines()]),
        next="micsctl launch without --master-port chooses a free one",
    )
