"""Machine images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from micsctl.aws.errors import code_of, explain
from micsctl.aws.session import Aws
from micsctl.errors import UsageError

# AWS Deep Learning Base AMI: driver, EFA, NCCL plugin. Ubuntu 24.04 has Python 3.12; 22.04's 3.10 is too old here.
DEFAULT_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


@dataclass(frozen=True)
class Image:
    id: str
    root_device: str
    root_gb: int  # of its snapshot: the root volume cannot be smaller


def find_image(aws: Aws, wanted: str | None) -> Image:
    """`wanted` is an AMI id, the name of an SSM parameter that holds one, or None for the default.

    Raises UsageError where there is no such image.
    """
    image_id = wanted if wanted and wanted.startswith("ami-") else _parameter(aws, wanted or DEFAULT_IMAGE)
    try:
        images = aws.ec2.describe_images(ImageIds=[image_id])["Images"]
    except ClientError as error:
        if not code_of(error).startswith("InvalidAMIID"):
            raise explain(error, f"look up the image {image_id}") from error
        images = []
    if not images:
        raise _no_image(aws, image_id, "an AMI belongs to one region, and may be private")
    return parse_image(images[0])


def parse_image(raw: Mapping[str, Any]) -> Image:
    """From one element of DescribeImages."""
    root = raw["RootDeviceName"]
    sizes = [
        int(mapping["Ebs"].get("VolumeSize", 0))
        for mapping in raw.get("BlockDeviceMappings", ())
        if mapping.get("DeviceName") == root and "Ebs" in mapping
    ]
    return Image(raw["ImageId"], root, max(sizes, default=0))


def _parameter(aws: Aws, name: str) -> str:
    try:
        return str(aws.ssm.get_parameter(Name=name)["Parameter"]["Value"])
    except ClientError as error:
        if code_of(error) in ("ParameterNotFound", "ValidationException"):
            raise _no_image(aws, name, "SSM has no parameter of this name") from error
        raise explain(error, f"read the SSM parameter {name}") from error


def _no_image(aws: Aws, wanted: str, why: str) -> UsageError:
    return UsageError(
        f"there is no image {wanted} in {aws.settings.region}", why, next="set cluster.image in mics.yaml"
    )
