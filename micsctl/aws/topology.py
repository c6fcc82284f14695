"""Which switches an instance hangs on (DescribeInstanceTopology)."""

from __future__ import annotations

from collections.abc import Sequence

from botocore.exceptions import ClientError

from micsctl.aws.errors import explain
from micsctl.aws.session import Aws

_NOT_OFFERED = ("UnsupportedOperation", "InvalidAction")
_IDS_PER_CALL = 100  # the action's documented limit


def network_nodes(aws: Aws, instance_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Network nodes per instance, coarsest first. Types that AWS describes no topology for are missing.

    Source: EC2 API reference, DescribeInstanceTopology: NetworkNodes are ordered top-down, and the last is the one
    nearest to the instance.
    """
    found: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(instance_ids), _IDS_PER_CALL):
        chunk = list(instance_ids[start : start + _IDS_PER_CALL])
        pages = aws.ec2.get_paginator("describe_instance_topology").paginate(InstanceIds=chunk)
        try:
            for page in pages:
                found |= {i["InstanceId"]: tuple(i.get("NetworkNodes", ())) for i in page["Instances"]}
        except ClientError as error:
            if error.response["Error"]["Code"] in _NOT_OFFERED:
                return {}
            raise explain(error, "ask which switches the nodes hang on") from error
    return found
