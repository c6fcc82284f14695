"""The images that exist, and the SSM parameters that name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from micsctl.sandbox.ec2.moto_parts import Ami, MotoParameters, ssm_models, utcnow
from micsctl.sandbox.ec2.naming import hex_id

IMAGES = ("base-oss-nvidia-driver-gpu-ubuntu-22.04", "base-oss-nvidia-driver-gpu-ubuntu-24.04")
_PARAMETER = "/aws/service/deeplearning/ami/x86_64/{name}/latest/ami-id"


class SandboxParameters(MotoParameters):  # type: ignore[misc]
    """SSM's public parameters, with those of the Deep Learning AMIs."""

    def __init__(self, account_id: str, region_name: str) -> None:
        super().__init__(account_id, region_name)
        for name in IMAGES:
            parameter = _PARAMETER.format(name=name)
            self[parameter] = [
                ssm_models.Parameter(
                    account_id=account_id,
                    name=parameter,
                    value=image_of(name, region_name),
                    parameter_type="String",
                    description=None,
                    allowed_pattern=None,
                    keyid=None,
                    last_modified_date=utcnow(),
                    version=1,
                    data_type="aws:ec2:image",
                )
            ]


def image_of(name: str, region: str) -> str:
    """The id of an image; an AMI has another one in each region."""
    return f"ami-{hex_id(name, region)}"


def images(backend: Any, region: str) -> Iterator[Any]:
    """Those of one region."""
    for name in IMAGES:
        yield Ami(
            backend,
            image_of(name, region),
            name=f"Deep Learning {name}",
            owner_id="898082745236",
            owner_alias="amazon",
            public=True,
            virtualization_type="hvm",
            architecture="x86_64",
            hypervisor="xen",
            root_device_type="ebs",
            root_device_name="/dev/sda1",
            region_name=f"{region}a",
            boot_mode="uefi-preferred",
        )
