"""Where the API is and how its machines are reached: plain settings, so that no code asks "is this the sandbox?"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AwsSettings:
    """What a provider answers. For real AWS all but region and profile keep their defaults."""

    region: str
    profile: str | None = None
    endpoint_url: str | None = None
    access_key: str | None = None  # None = the usual chain of AWS credentials
    secret_key: str | None = None
    poll_seconds: float = 5.0  # between two looks at a changing resource
    ssh_user: str = "ubuntu"
    ssh_port: int = 22
    caller_cidr: str | None = None  # where SSH may come from; None = ask a public "what is my address" service
    vpc_cidr: str = "10.77.0.0/16"  # of the VPC that `up` makes; a /16
