"""From nothing to N nodes that answer over SSH. Running it again goes on where it stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from micsctl.aws.addresses import associate, ensure_address, list_addresses
from micsctl.aws.caller import find_caller_cidr
from micsctl.aws.images import Image, find_image
from micsctl.aws.instances import Instance, list_instances, tag_index
from micsctl.aws.keys import ensure_key_file, ensure_key_pair, find_key_pair, fingerprint
from micsctl.aws.network import Subnet, ensure_security_group, ensure_vpc, find_subnet
from micsctl.aws.session import Aws
from micsctl.aws.types import InstanceType, find_type, zones_of
from micsctl.cluster.down import costs_of, remove_all
from micsctl.cluster.find import assemble
from micsctl.cluster.journal import Journal, launched_ids, open_launch
from micsctl.cluster.launch import NodesEnded, Order, launch, wait_running
from micsctl.cluster.model import Cluster
from micsctl.cluster.progress import Progress
from micsctl.cluster.ready import ensure_known_hosts, wait_ready
from micsctl.errors import Interrupted, MicsctlError, PartialError, UsageError
from micsctl.home import ClusterFiles
from micsctl.remote.host import Host
from micsctl.spec import Spec

OpenHosts = Callable[[Cluster, ClusterFiles], AbstractContextManager[Sequence[Host]]]
_ROLL_BACK_SECONDS = 20 * 60


@dataclass(frozen=True)
class Offer:
    """What AWS offers for the spec, looked up before anything is created."""

    type: InstanceType
    image: Image
    zones: tuple[str, ...]  # to be tried, in this order
    offered: frozenset[str]  # zones that have the type


@dataclass(frozen=True)
class Network:
    vpc_id: str
    subnet: Subnet | None  # the user's; None = one of the cluster's own in each zone
    security_group_id: str


def up(
    aws: Aws,
    spec: Spec,
    files: ClusterFiles,
    *,
    report: Progress,
    open_hosts: OpenHosts,
    ready_seconds: float = 30 * 60,
) -> Cluster:
    """The cluster of `spec`, ready: found where it exists, made where it does not.

    `ready_seconds` is the time from "running" to "ready". Raises UsageError before anything is created;
    CapacityError, PermissionDenied, CredentialsError when nothing was started (then nothing is left); PartialError
    when machines exist that cost money; Interrupted on Ctrl-C. `costs` of each says what exists.
    """
    journal = Journal(files.journal)
    with report.phase("look at what is there and what is offered"):
        instances = _existing(aws, spec)
        subnet = find_subnet(aws, spec.cluster.subnet) if spec.cluster.subnet else None
        type = find_type(aws, spec.cluster.type)
        if instances:
            _require_key(aws, spec.name, files)
        offer = None if instances else _offer(aws, spec, type, subnet)
    try:
        with report.phase("network and address"):
            network = _network(aws, spec.name, subnet, journal)
            address = ensure_address(aws, spec.name, journal.intend)  # first, since an account has few of them
        if offer:
            instances = _start(aws, spec, files, journal, offer, network, report)
        with report.phase(f"wait until {len(instances)} nodes run"):
            instances = wait_running(aws, spec.name, [instance.id for instance in instances], report)
            _fix_indices(aws, spec.name, instances)
            associate(aws, address, instances[0].interface_id)
        cluster = assemble(aws, spec.name, spec.provider, instances, list_addresses(aws, spec.name))
        _wait_ready(aws, cluster, files, type, report, open_hosts, time.monotonic() + ready_seconds)
        return cluster
    except KeyboardInterrupt:
        left = _roll_back_or_list(aws, spec.name, journal, report)
        raise Interrupted("up was stopped by Ctrl-C", costs=left.costs, next=left.next) from None
    except MicsctlError as error:
        left = _roll_back_or_list(aws, spec.name, journal, report)
        if left.machines:
            raise PartialError(error.what, error.why, costs=left.costs, next=left.next) from error
        error.costs, error.next = left.costs, error.next or left.next
        raise


def _existing(aws: Aws, spec: Spec) -> list[Instance]:
    """The cluster's living machines. Raises UsageError where they are not what the spec asks for."""
    instances = [instance for instance in list_instances(aws, spec.name) if instance.alive]
    if not instances:
        return []
    stopped = [instance for instance in instances if instance.state not in ("pending", "running")]
    there = f"{len(instances)} x {instances[0].type}"
    wanted = f"{spec.cluster.nodes} x {spec.cluster.type}"
    if stopped or there != wanted:
        raise UsageError(
            f"cluster {spec.name!r} exists already and is not what mics.yaml asks for",
            f"there are {there}, asked for are {wanted}\n"
            + "\n".join(f"{instance.name}: {instance.state}" for instance in instances),
            costs=there,
            next=f"micsctl down -n {spec.name}, then micsctl up",
        )
    return instances


def _require_key(aws: Aws, name: str, files: ClusterFiles) -> None:
    """Machines that exist accept one key only: the one that they were started with."""
    pair = find_key_pair(aws, name)
    mine = fingerprint(ensure_key_file(files.key)) if files.key.exists() else "no such file"
    if pair is None or pair[1] != mine:
        raise UsageError(
            f"this laptop does not have the key of cluster {name!r}",
            f"{files.key}: {mine}\nkey pair in AWS: {pair[1] if pair else 'deleted'}",
            costs="the cluster exists and costs money",
            next=f"use the laptop that made it, or micsctl down -n {name}",
        )


def _offer(aws: Aws, spec: Spec, type: InstanceType, subnet: Subnet | None) -> Offer:
    offered = zones_of(aws, type.name)
    if subnet and spec.cluster.zones and subnet.zone not in spec.cluster.zones:
        raise UsageError(
            f"the subnet {subnet.id} is in {subnet.zone}, which is not in cluster.zones",
            next="drop cluster.zones from mics.yaml: the subnet fixes the zone",
        )
    zones = (subnet.zone,) if subnet else spec.cluster.zones or offered
    return Offer(type, find_image(aws, spec.cluster.image), zones, frozenset(offered))


def _network(aws: Aws, name: str, subnet: Subnet | None, journal: Journal) -> Network:
    caller = find_caller_cidr(aws.settings)  # may fail, so before anything is made
    vpc_id = subnet.vpc_id if subnet else ensure_vpc(aws, name, journal.intend)
    return Network(vpc_id, subnet, ensure_security_group(aws, name, vpc_id, caller, journal.intend))


def _start(
    aws: Aws, spec: Spec, files: ClusterFiles, journal: Journal, offer: Offer, network: Network, report: Progress
) -> list[Instance]:
    files.known_hosts.unlink(missing_ok=True)  # of machines that are gone
    order = Order(
        cluster=spec.name,
        nodes=spec.cluster.nodes,
        type=offer.type,
        image=offer.image,
        volume_gb=spec.cluster.volume_gb,
        ttl=spec.cluster.ttl,
        zones=offer.zones,
        offered=offer.offered,
        vpc_id=network.vpc_id,
        subnet=network.subnet,
        security_group_id=network.security_group_id,
        key_name=ensure_key_pair(aws, spec.name, ensure_key_file(files.key), journal.intend),
        instance_profile=spec.cluster.instance_profile,
    )
    return launch(aws, order, journal, report)


def _fix_indices(aws: Aws, name: str, instances: Sequence[Instance]) -> None:
    for instance in instances:
        if not instance.indexed:
            tag_index(aws, name, instance)


def _wait_ready(
    aws: Aws,
    cluster: Cluster,
    files: ClusterFiles,
    type: InstanceType,
    report: Progress,
    open_hosts: OpenHosts,
    deadline: float,
) -> None:
    def check_alive() -> None:
        ids = {node.instance_id for node in cluster.nodes}
        ended = [one for one in list_instances(aws, cluster.name) if one.id in ids and not one.alive]
        if ended:
            raise NodesEnded(ended)

    with report.phase("read the host keys"):
        ensure_known_hosts(aws, cluster, files, nitro=type.nitro, deadline=deadline, report=report)
    with report.phase("wait until every node is ready"), open_hosts(cluster, files) as hosts:
        wait_ready(
            hosts,
            every_seconds=aws.settings.poll_seconds,
            deadline=deadline,
            report=report,
            check_alive=check_alive,
        )


@dataclass(frozen=True)
class _Left:
    """What a failed `up` leaves behind."""

    machines: bool  # exist, or may exist
    costs: str
    next: str


def _roll_back_or_list(aws: Aws, name: str, journal: Journal, report: Progress) -> _Left:
    """Without machines everything is removed again; machines are left as they are, since `up` can go on with them.

    Never raises a MicsctlError, since another error is being reported.
    """
    remove = f"micsctl down -n {name}"
    try:
        living = [instance for instance in list_instances(aws, name) if instance.alive]
        if not living:
            remove_all(aws, name, journal, report, time.monotonic() + _ROLL_BACK_SECONDS)
    except MicsctlError as error:
        records = journal.read()
        started = bool(launched_ids(records)) or open_launch(records) is not None
        return _Left(started, f"{costs_of(aws, name)}\n(could not roll back: {error.what})", remove)
    if not living:
        return _Left(False, costs_of(aws, name), f"micsctl up -n {name}")
    ends_at = assemble(aws, name, "", living, []).ends_at
    costs = f"{costs_of(aws, name)}\nthe nodes end by themselves at {ends_at:%Y-%m-%d %H:%M} UTC"
    return _Left(True, costs, f"micsctl up -n {name} goes on; {remove} removes all of it")
