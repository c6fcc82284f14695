"""The instance metadata service, version 2: what an instance asks at 169.254.169.254.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from micsctl.sandbox.roles import RoleCredentials, RoleKeys

_MAX_TOKEN_SECONDS = 21600
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class InstanceFacts:
    """What one instance is told about itself."""

    instance_id: str
    instance_type: str
    image_id: str
    launch_index: int
    private_ip: str
    private_dns: str
    public_ip: str  # "" = none
    mac: str
    subnet_id: str
    vpc_id: str
    zone: str
    region: str
    placement_group: str  # "" = none
    account: str
    security_groups: tuple[str, ...]
    role: str  # "" = launched without an instance profile
    tags: Mapping[str, str]
    user_data: bytes
    tokens_required: bool
    enabled: bool
    tags_allowed: bool
    interrupted_at: datetime | None  # None = no spot notice


StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class MetadataService:
    """A WSGI application. `identify` tells the instance by the peer's address or by its id.

    secret  "" = the peer's address tells; else paths begin with /<secret>/<instance id>, and nothing else is
            answered: every user of this machine reaches a loopback address, and sees instance ids in `ps`
    """

    def __init__(self, identify: Callable[[str, str], InstanceFacts | None], roles: RoleKeys, secret: str = "") -> None:
        self._identify, self._roles = identify, roles
        self._secret = secret
        self._key = secrets.token_bytes(32)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        status, body = self._answer(environ)
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    def _answer(self, environ: Mapping[str, Any]) -> tuple[str, bytes]:
        path, address = str(environ["PATH_INFO"]), str(environ.get("REMOTE_ADDR", ""))
        instance_id = ""
        if self._secret:
            secret, _, rest = path[1:].partition("/")
            if not hmac.compare_digest(secret.encode(), self._secret.encode()):
                return "404 Not Found", b""
            instance_id, _, path = rest.partition("/")
            address, path = "", f"/{path}"
        facts = self._identify(address, instance_id)
        if facts is None:
            return "404 Not Found", b""
        if not facts.enabled or "HTTP_X_FORWARDED_FOR" in environ:
            return "403 Forbidden", b""
        if environ["REQUEST_METHOD"] == "PUT" and path == "/latest/api/token":
            return self._token(facts, str(environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN_TTL_SECONDS", "")))
        if environ["REQUEST_METHOD"] != "GET":
            return "405 Method Not Allowed", b""
        token = environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN")
        if (token is None and facts.tokens_required) or (token is not None and not self._valid(facts, str(token))):
            return "401 Unauthorized", b""
        now = datetime.now(UTC)
        credentials = self._roles.credentials(facts.instance_id, facts.role, now) if facts.role else None
        found = _find(tree(facts, credentials), path)
        return ("404 Not Found", b"") if found is None else ("200 OK", found)

    def _token(self, facts: InstanceFacts, seconds: str) -> tuple[str, bytes]:
        if not seconds.isdigit() or not 1 <= int(seconds) <= _MAX_TOKEN_SECONDS:
            return "400 Bad Request", b""
        ends_at = str(int(time.time()) + int(seconds))
        return "200 OK", f"{ends_at}-{self._mac(facts, ends_at)}".encode()

    def _valid(self, facts: InstanceFacts, token: str) -> bool:
        ends_at, _, mac = token.partition("-")
        fresh = ends_at.isdigit() and int(ends_at) >= time.time()
        return fresh and hmac.compare_digest(mac.encode(), self._mac(facts, ends_at).encode())

    def _mac(self, facts: InstanceFacts, ends_at: str) -> str:
        return hmac.digest(self._key, f"{facts.instance_id}/{ends_at}".encode(), "sha256").hex()


def tree(facts: InstanceFacts, credentials: RoleCredentials | None) -> dict[str, Any]:
    """Everything under /latest, as nested folders. Pure."""
    interface = {
        "device-number": "0",
        "local-ipv4s": facts.private_ip,
        "mac": facts.mac,
        "subnet-id": facts.subnet_id,
        "vpc-id": facts.vpc_id,
        **({"public-ipv4s": facts.public_ip} if facts.public_ip else {}),
    }
    meta: dict[str, Any] = {
        "ami-id": facts.image_id,
        "ami-launch-index": str(facts.launch_index),
        "hostname": facts.private_dns,
        "instance-id": facts.instance_id,
        "instance-type": facts.instance_type,
        "local-hostname": facts.private_dns,
        "local-ipv4": facts.private_ip,
        "mac": facts.mac,
        "network": {"interfaces": {"macs": {facts.mac: interface}}},
        "placement": {
            "availability-zone": facts.zone,
            "region": facts.region,
            **({"group-name": facts.placement_group} if facts.placement_group else {}),
        },
        "security-groups": "\n".join(facts.security_groups),
        **({"public-ipv4": facts.public_ip} if facts.public_ip else {}),
        **({"tags": {"instance": dict(facts.tags)}} if facts.tags_allowed else {}),
        **({"spot": _spot_notice(facts.interrupted_at)} if facts.interrupted_at else {}),
    }
    if credentials:
        meta["iam"] = {"security-credentials": {credentials.role: _as_json(credentials)}}
    identity = {
        "accountId": facts.account,
        "architecture": "x86_64",
        "availabilityZone": facts.zone,
        "imageId": facts.image_id,
        "instanceId": facts.instance_id,
        "instanceType": facts.instance_type,
        "privateIp": facts.private_ip,
        "region": facts.region,
        "version": "2017-09-30",
    }
    return {
        "meta-data": meta,
        "dynamic": {"instance-identity": {"document": json.dumps(identity, indent=2)}},
        **({"user-data": facts.user_data} if facts.user_data else {}),
    }


def _spot_notice(ends_at: datetime) -> dict[str, str]:
    at = ends_at.strftime(_TIME)
    return {"instance-action": json.dumps({"action": "terminate", "time": at}), "termination-time": at}


def _as_json(credentials: RoleCredentials) -> str:
    """In AWS's form."""
    return json.dumps(
        {
            "Code": "Success",
            "LastUpdated": credentials.starts_at.strftime(_TIME),
            "Type": "AWS-HMAC",
            "AccessKeyId": credentials.key.access_key,
            "SecretAccessKey": credentials.key.secret_key,
            "Token": credentials.token,
            "Expiration": credentials.ends_at.strftime(_TIME),
        }
    )


def _find(root: Mapping[str, Any], path: str) -> bytes | None:
    """A file's content, or a folder's list as AWS prints it: folders end with a slash."""
    parts = [part for part in path.split("/") if part]
    if not parts or parts[0] != "latest":
        return None
    here: Any = root
    for part in parts[1:]:
        if not isinstance(here, Mapping) or part not in here:
            return None
        here = here[part]
    if isinstance(here, Mapping):
        return "\n".join(f"{name}/" if isinstance(value, Mapping) else name for name, value in here.items()).encode()
    return here if isinstance(here, bytes) else str(here).encode()
