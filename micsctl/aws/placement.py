"""Cluster placement groups: one for each attempt in a zone, named with the zone."""

from __future__ import annotations

from micsctl.aws.create import Intend
from micsctl.aws.errors import explained
from micsctl.aws.session import Aws
from micsctl.aws.tags import cluster_tags, filters, specification


def ensure_placement_group(aws: Aws, cluster: str, zone: str, intend: Intend) -> str:
    """Name of the cluster's placement group for this zone."""
    name = f"micsctl-{cluster}-{zone}"
    with explained(f"make the placement group {name}"):
        if name not in list_placement_groups(aws, cluster):
            intend("CreatePlacementGroup", name=name)
            aws.ec2.create_placement_group(
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=specification("placement-group", cluster_tags(cluster, name)),
            )
    return name


def list_placement_groups(aws: Aws, cluster: str) -> list[str]:
    with explained("list the placement groups"):
        groups = aws.ec2.describe_placement_groups(Filters=filters(cluster))["PlacementGroups"]
    return [group["GroupName"] for group in groups if group.get("State") != "deleted"]
