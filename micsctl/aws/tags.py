"""Tags are the truth: how micsctl's resources are marked and found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CLUSTER = "micsctl:cluster"
INDEX = "micsctl:index"
ENDS_AT = "micsctl:ends-at"  # Unix seconds
SSH_USER = "micsctl:ssh-user"
KEY = "micsctl:key"  # fingerprint of the public key

Tags = Mapping[str, str]


def as_list(tags: Tags) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def as_dict(raw: Iterable[Mapping[str, str]] | None) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in raw or ()}


def cluster_tags(cluster: str, name: str = "") -> dict[str, str]:
    """What every resource carries; `name` is what the AWS console shows."""
    return {CLUSTER: cluster, "Name": name or f"micsctl-{cluster}"}


def specification(resource_type: str, tags: Tags) -> list[dict[str, Any]]:
    """The TagSpecifications of a create call: a resource is tagged from its first moment or does not exist."""
    return [{"ResourceType": resource_type, "Tags": as_list(tags)}]


def filters(cluster: str, **more: str) -> list[dict[str, Any]]:
    """Filters for resources of the cluster; `more` as vpc_id="vpc-1"."""
    exact = {f"tag:{CLUSTER}": cluster} | {key.replace("_", "-"): value for key, value in more.items()}
    return [{"Name": name, "Values": [value]} for name, value in exact.items()]
