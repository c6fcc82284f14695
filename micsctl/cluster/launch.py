"""All nodes in one zone, or none: zones are tried in order, each with one RunInstances call."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from micsctl.aws.errors import CAPACITY_CODES
from micsctl.aws.images import Image
from micsctl.aws.instances import (
    Instance,
    Launch,
    LaunchRefused,
    list_instances,
    run_instances,
    run_instances_parameters,
    terminate,
)
from micsctl.aws.inventory import resources
from micsctl.aws.network import Subnet, ensure_subnet
from micsctl.aws.placement import ensure_placement_group
from micsctl.aws.remove import try_remove
from micsctl.aws.session import Aws
from micsctl.aws.tags import ENDS_AT, SSH_USER, cluster_tags
from micsctl.aws.types import InstanceType
from micsctl.cluster.bootstrap import render_bootstrap
from micsctl.cluster.interrupts import interrupt_afterwards
from micsctl.cluster.journal import Journal, open_launch
from micsctl.cluster.progress import Progress
from micsctl.errors import CapacityError, MicsctlError

_VISIBLE_AFTER_SECONDS = 60  # an instance that AWS does not show yet is "not yet" for so long
_NOT_OFFERED = "not offered here"


@dataclass(frozen=True)
class Order:
    """What is launched, the same for every zone."""

    cluster: str
    nodes: int
    type: InstanceType
    image: Image
    volume_gb: int
    ttl: timedelta
    zones: tuple[str, ...]  # in the order in which they are tried
    offered: frozenset[str]  # zones that have the type
    vpc_id: str
    subnet: Subnet | None  # the user's; None = one of the cluster's own in each zone
    security_group_id: str
    key_name: str
    instance_profile: str | None


@dataclass(frozen=True)
class Attempt:
    """A zone that did not give the machines."""

    zone: str
    reason: str  # AWS's code, or "not offered here"
    at: str  # hh:mm:ss, local time
    message: str


class NodesEnded(MicsctlError):
    """Nodes ended while the cluster came up. `code` is AWS's reason for the first of them."""

    def __init__(self, ended: Sequence[Instance]) -> None:
        super().__init__(
            f"{', '.join(instance.name for instance in ended)} ended while the cluster came up",
            "\n".join(f"{instance.name}: {instance.reason or instance.state}" for instance in ended),
        )
        # "Server.InsufficientInstanceCapacity: Insufficient capacity to satisfy instance request"
        self.code = ended[0].reason.split(":")[0].rpartition(".")[2]


def launch(aws: Aws, order: Order, journal: Journal, report: Progress) -> list[Instance]:
    """The running nodes, in node order.

    Raises CapacityError with a table of zones when none of them has the machines. After any error no machine of this
    launch is left, except where the error says otherwise.
    """
    attempts: list[Attempt] = []
    for zone in order.zones:
        if zone not in order.offered:
            attempts.append(_attempt(zone, _NOT_OFFERED, ""))
            continue
        with report.phase(f"start {order.nodes} x {order.type.name} in {zone}"):
            outcome = _launch_in(aws, order, zone, journal, report)
            if isinstance(outcome, Attempt):
                report.note(outcome.reason)
        if not isinstance(outcome, Attempt):
            return outcome
        attempts.append(outcome)
    raise CapacityError(
        f"no {order.type.name} capacity in {len(attempts)} of {len(attempts)} zones",
        zone_table(attempts),
        next="try other zones (cluster.zones) or another region, or micsctl up again later",
    )


def zone_table(attempts: Sequence[Attempt]) -> str:
    """One line per zone: name, reason, time; then AWS's words for each kind of reason."""
    width = max((len(attempt.reason) for attempt in attempts), default=0)
    lines = [
        f"{attempt.zone}  {attempt.reason:<{width}}  {attempt.at if attempt.reason != _NOT_OFFERED else ''}".rstrip()
        for attempt in attempts
    ]
    messages = {attempt.reason: attempt.message for attempt in attempts if attempt.message}
    return "\n".join([*lines, *messages.values()])


def _attempt(zone: str, reason: str, message: str) -> Attempt:
    return Attempt(zone, reason, time.strftime("%H:%M:%S"), message)


def _launch_in(aws: Aws, order: Order, zone: str, journal: Journal, report: Progress) -> list[Instance] | Attempt:
    """The running nodes, or why this zone does not give them (then nothing of the attempt is left)."""
    subnet = order.subnet or ensure_subnet(aws, order.cluster, order.vpc_id, zone, journal.intend)
    group = None
    if order.type.cluster_placement and order.nodes > 1:
        group = ensure_placement_group(aws, order.cluster, zone, journal.intend)
    try:
        ids = _request(aws, order, subnet, group, journal)
    except LaunchRefused as refused:
        if not refused.zone_only:
            raise refused.explained from refused
        _forget_placement_groups(aws, order.cluster)
        return _attempt(zone, refused.code, refused.explained.why)
    try:
        return wait_running(aws, order.cluster, ids, report)
    except NodesEnded as ended:
        terminate(aws, ids)
        _wait_ended(aws, order.cluster, ids)
        if ended.code not in CAPACITY_CODES:
            raise
        _forget_placement_groups(aws, order.cluster)
        return _attempt(zone, ended.code, ended.why)


def _request(aws: Aws, order: Order, subnet: Subnet, group: str | None, journal: Journal) -> list[str]:
    """Ids of the started machines, in launch order; of an earlier launch if its answer got lost.

    Raises LaunchRefused.
    """
    token, ends_at = secrets.token_hex(16), datetime.now(UTC) + order.ttl
    parameters = _parameters(aws, order, subnet, group, token, ends_at)
    lost = open_launch(journal.read())
    if lost and lost.ends_at > datetime.now(UTC).timestamp():
        # the same token and the same parameters: AWS answers with the machines of that launch if there was one
        again = _parameters(aws, order, subnet, group, lost.token, datetime.fromtimestamp(lost.ends_at, UTC))
        if _digest(again) == lost.digest:
            token, parameters, ends_at = lost.token, again, datetime.fromtimestamp(lost.ends_at, UTC)
    with interrupt_afterwards():
        journal.intend(
            "RunInstances",
            token=token,
            zone=subnet.zone,
            ends_at=int(ends_at.timestamp()),
            digest=_digest(parameters),
        )
        try:
            ids = run_instances(aws, parameters, subnet.zone)
        except LaunchRefused as refused:
            if not refused.unknown:
                journal.write("refused", token=token, code=refused.code)
            raise
        journal.write("launched", token=token, zone=subnet.zone, instances=ids)
    return ids


def _parameters(
    aws: Aws, order: Order, subnet: Subnet, group: str | None, token: str, ends_at: datetime
) -> dict[str, Any]:
    ssh_user = aws.settings.ssh_user
    tags = cluster_tags(order.cluster) | {ENDS_AT: str(int(ends_at.timestamp())), SSH_USER: ssh_user}
    launch = Launch(
        nodes=order.nodes,
        type=order.type,
        image=order.image,
        volume_gb=order.volume_gb,
        subnet_id=subnet.id,
        security_group_id=order.security_group_id,
        key_name=order.key_name,
        placement_group=group,
        user_data=render_bootstrap(cluster=order.cluster, ssh_user=ssh_user, ends_at=ends_at),
        tags=tags,
        instance_profile=order.instance_profile,
    )
    return run_instances_parameters(launch, token)


def _digest(parameters: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


def wait_running(aws: Aws, cluster: str, ids: Sequence[str], report: Progress) -> list[Instance]:
    """All of them, in node order, once all run.

    Raises NodesEnded when one ends, MicsctlError when AWS still does not show one after a minute, or one is still not
    running after ten.
    """
    began = time.monotonic()
    while True:
        seen = [instance for instance in list_instances(aws, cluster) if instance.id in ids]
        if ended := [instance for instance in seen if not instance.alive]:
            raise NodesEnded(ended)
        running = [instance for instance in seen if instance.state == "running"]
        if len(running) == len(ids):
            return running
        report.note(f"{len(running)} of {len(ids)} running")
        waited = time.monotonic() - began
        if waited > 10 * 60 or (len(seen) < len(ids) and waited > _VISIBLE_AFTER_SECONDS):
            states = {instance.id: instance.state for instance in seen}
            raise MicsctlError(
                f"{len(running)} of {len(ids)} nodes run after {waited:.0f} s",
                "\n".join(f"{id}: {states.get(id, 'unknown to AWS')}" for id in ids),
            )
        time.sleep(aws.settings.poll_seconds)


def _wait_ended(aws: Aws, cluster: str, ids: Sequence[str]) -> None:
    deadline = time.monotonic() + 10 * 60
    while any(one.id in ids and one.state != "terminated" for one in list_instances(aws, cluster)):
        if time.monotonic() > deadline:
            raise MicsctlError("the nodes of a failed launch did not end within 10 minutes", ", ".join(ids))
        time.sleep(aws.settings.poll_seconds)


def _forget_placement_groups(aws: Aws, cluster: str) -> None:
    """Groups of attempts that failed; one that is still in use for a while is left to `down`."""
    for resource in resources(aws, cluster):
        if resource.kind == "placement group":
            try_remove(aws, resource)
