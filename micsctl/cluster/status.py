"""What exists under a cluster's name, by the API alone: no key is needed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from micsctl.aws.addresses import list_addresses
from micsctl.aws.instances import list_instances
from micsctl.aws.inventory import Resource, resources
from micsctl.aws.session import Aws
from micsctl.aws.tags import ENDS_AT
from micsctl.cluster.find import assemble, node_of
from micsctl.cluster.model import Cluster, Node


@dataclass(frozen=True)
class Status:
    """`cluster` is None where no machine lives; `resources` may still hold what a half-done `up` or `down` left."""

    cluster: Cluster | None
    ended: tuple[Node, ...]  # nodes of the same launch that are gone; AWS shows them for about an hour
    uptime_seconds: float
    seconds_left: float  # until the end that `up` set; the nodes' own `ends_at` may be later
    resources: tuple[Resource, ...]


def status(aws: Aws, name: str, provider: str, *, now: datetime) -> Status:
    """Raises MicsctlError where AWS does not answer."""
    instances = list_instances(aws, name)
    alive = [instance for instance in instances if instance.alive]
    found = tuple(resources(aws, name))
    if not alive:
        return Status(None, (), 0.0, 0.0, found)
    cluster = assemble(aws, name, provider, alive, list_addresses(aws, name))
    launch = alive[0].tags.get(ENDS_AT)
    return Status(
        cluster=cluster,
        ended=tuple(
            node_of(instance, None)
            for instance in instances
            if not instance.alive and instance.tags.get(ENDS_AT) == launch
        ),
        uptime_seconds=max(0.0, (now - cluster.created_at).total_seconds()),
        seconds_left=max(0.0, (cluster.ends_at - now).total_seconds()),
        resources=found,
    )
