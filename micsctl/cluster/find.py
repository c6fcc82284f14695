"""The cluster as AWS knows it: from tags only, so that any laptop can do it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from micsctl.aws.addresses import Address, list_addresses
from micsctl.aws.instances import Instance, list_instances
from micsctl.aws.session import Aws
from micsctl.aws.tags import ENDS_AT, SSH_USER
from micsctl.cluster.model import Cluster, Node


def find(aws: Aws, name: str, provider: str) -> Cluster | None:
    """The cluster's living machines in node order; None where there is none. Raises MicsctlError."""
    instances = [instance for instance in list_instances(aws, name) if instance.alive]
    return assemble(aws, name, provider, instances, list_addresses(aws, name)) if instances else None


def assemble(
    aws: Aws, name: str, provider: str, instances: Sequence[Instance], addresses: Sequence[Address]
) -> Cluster:
    """The value for these instances (at least one, in node order)."""
    first = instances[0]
    public_ips = {address.instance_id: address.public_ip for address in addresses if address.instance_id}
    return Cluster(
        name=name,
        provider=provider,
        region=aws.settings.region,
        zone=first.zone,
        instance_type=first.type,
        ssh_user=first.tags.get(SSH_USER, aws.settings.ssh_user),
        ssh_port=aws.settings.ssh_port,
        created_at=first.launched_at,
        ends_at=datetime.fromtimestamp(int(first.tags.get(ENDS_AT, "0")), UTC),
        nodes=tuple(node_of(instance, public_ips.get(instance.id)) for instance in instances),
    )


def node_of(instance: Instance, public_ip: str | None) -> Node:
    return Node(
        index=instance.index,
        instance_id=instance.id,
        state=instance.state,
        private_ip=instance.private_ip,
        public_ip=public_ip,
    )
