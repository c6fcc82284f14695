"""Asks every node what it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from micsctl.cluster.model import Cluster
from micsctl.errors import HealthError
from micsctl.remote import fanout
from micsctl.remote.host import Host
from micsctl.topology import parse, probe
from micsctl.topology.facts import node_facts
from micsctl.topology.model import CpuDevices, NodeFacts, Topology
from micsctl.topology.order import order


def discover(
    cluster: Cluster,
    hosts: Sequence[Host],
    *,
    cpu_devices: CpuDevices | None,
    network_nodes: Mapping[str, tuple[str, ...]],
) -> Topology:
    """Probe every host, eight at a time, and put the nodes in rank order.

    cpu_devices     the devices of CPU nodes; None = every node must have GPUs
    network_nodes   AWS's switch layers by instance id, coarsest first (DescribeInstanceTopology); may lack nodes

    Raises HostError where a node cannot be reached, HealthError where it cannot train; with several, one error that
    names each node.
    """
    node_of = {node.index: node for node in cluster.nodes}

    def ask(host: Host) -> NodeFacts:
        node = node_of[host.index]
        text = host.run(probe.COMMAND, timeout_seconds=probe.COMMAND_SECONDS).stdout
        return node_facts(
            text,
            node,
            clock_offset_seconds=clock_offset_seconds(host),
            cpu_devices=cpu_devices,
            network_nodes=network_nodes.get(node.instance_id, ()),
        )

    return Topology(order(fanout.each(hosts, ask)))


def clock_offset_seconds(host: Host, *, tries: int = 3, now: Callable[[], float] = time.time) -> float:
    """The node's clock minus this machine's, from the quickest of `tries` questions.

    The answer is taken to be made half-way through its round trip, so the error is at most half of that.
    """
    exchanges = []
    for _ in range(tries):
        asked_at = now()
        answer = host.run(probe.CLOCK).stdout
        answered_at = now()
        try:
            theirs = parse.seconds(answer)
        except parse.ParseError as error:
            raise HealthError(f"cannot read the clock of {host.name}", str(error)) from None
        exchanges.append((answered_at - asked_at, theirs - (asked_at + answered_at) / 2))
    return min(exchanges)[1]
