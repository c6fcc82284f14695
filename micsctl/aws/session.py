"""Clients of the AWS services."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from micsctl.aws.errors import explain
from micsctl.aws.settings import AwsSettings

_CONNECT_SECONDS = 10
_READ_SECONDS = 60


@dataclass(frozen=True)
class Aws:
    """What the modules of this package work with."""

    settings: AwsSettings
    ec2: Any
    launcher: Any  # an EC2 client without retries, for RunInstances only
    ssm: Any
    sts: Any


def connect(settings: AwsSettings) -> Aws:
    """Make the clients; nothing is sent yet. Raises CredentialsError for an unknown profile."""
    retrying = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 6},
        max_pool_connections=16,
        # an endpoint of one's own is on this machine or in this network: HTTP_PROXY is not the way there
        proxies={} if settings.endpoint_url else None,
    )
    # "No capacity" is HTTP 500, which botocore repeats silently for many seconds. `max_attempts` would count retries.
    once = retrying.merge(Config(retries={"mode": "standard", "total_max_attempts": 1}))
    try:
        session = boto3.Session(
            botocore_session=_without_aws_files() if settings.access_key else None,
            profile_name=settings.profile,
            region_name=settings.region,
            aws_access_key_id=settings.access_key,
            aws_secret_access_key=settings.secret_key,
        )
        make = session.client
        return Aws(
            settings=settings,
            ec2=make("ec2", endpoint_url=settings.endpoint_url, config=retrying),
            launcher=make("ec2", endpoint_url=settings.endpoint_url, config=once),
            ssm=make("ssm", endpoint_url=settings.endpoint_url, config=retrying),
            sts=make("sts", endpoint_url=settings.endpoint_url, config=retrying),
        )
    except BotoCoreError as error:
        raise explain(error, "set up the AWS clients") from error


def _without_aws_files() -> botocore.session.Session:
    """For explicit keys: neither AWS_PROFILE nor what stands in ~/.aws, which may be broken, plays a part."""
    nothing, empty_file = (None, None, None, None), (None, None, os.devnull, None)
    return botocore.session.Session(
        session_vars={"profile": nothing, "config_file": empty_file, "credentials_file": empty_file}
    )
