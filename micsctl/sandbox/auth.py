"""AWS Signature Version 4, both ways: a root server on loopback must not be a way in for other users.

The rules are those of https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, quote

_MAX_SKEW = timedelta(minutes=5)
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/ ,]+)/(\d{8})/([^/ ,]+)/([^/ ,]+)/aws4_request, ?"
    r"SignedHeaders=([^ ,]+), ?Signature=([0-9a-f]{64})"
)


@dataclass(frozen=True)
class Key:
    access_key: str
    secret_key: str


@dataclass(frozen=True)
class Request:
    """As it came over the wire. Header names are lower case; `path` is still percent-encoded."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes | None  # None = not read yet: its reader compares it with X-Amz-Content-SHA256


@dataclass(frozen=True)
class Refusal:
    """`code` is S3's, which has the finest ones."""

    code: str
    why: str


def service_of(request: Request) -> str:
    """The service that the request says it is signed for; "" where it is not signed."""
    match = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    return match[4] if match else ""


def refusal(request: Request, key: Key, now: datetime) -> Refusal | None:
    """None for a request that `key` signed within the last minutes, else why it is refused."""
    match = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    if not match:
        return Refusal("AccessDenied", "the request is not signed with AWS Signature Version 4")
    access_key, day, region, service, signed_headers, signature = match.groups()
    if not hmac.compare_digest(access_key.encode(), key.access_key.encode()):
        return Refusal("InvalidAccessKeyId", "the access key is not the sandbox's")
    stamp = request.headers.get("x-amz-date", "")
    try:
        signed_at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return Refusal("AccessDenied", "X-Amz-Date is missing or not a date")
    if not stamp.startswith(day) or abs(now - signed_at) > _MAX_SKEW:
        return Refusal("RequestTimeTooSkewed", "the signature has expired")
    names = signed_headers.split(";")
    if not {"host", "x-amz-date"} <= set(names):
        return Refusal("SignatureDoesNotMatch", "Host and X-Amz-Date must be signed")
    claimed = request.headers.get("x-amz-content-sha256", "")
    if request.body is not None:
        body_hash = hashlib.sha256(request.body).hexdigest()
        claimed = claimed or body_hash
        if not is_body_hash(claimed, body_hash):
            return Refusal("XAmzContentSHA256Mismatch", "the body is not the one that was signed")
    elif not claimed:
        return Refusal("InvalidRequest", "X-Amz-Content-SHA256 is missing")
    expected = _signature(request, key, stamp, region, service, names, claimed)
    if not hmac.compare_digest(expected, signature):
        return Refusal("SignatureDoesNotMatch", "the signature is wrong")
    return None


def is_body_hash(claimed: str, body_hash: str) -> bool:
    """Is this what X-Amz-Content-SHA256 claims? It may also say that the body is not signed, or in pieces."""
    return claimed == body_hash or not re.fullmatch("[0-9a-f]{64}", claimed)


def sign(request: Request, key: Key, now: datetime, *, region: str = "us-east-1", service: str) -> dict[str, str]:
    """The headers of `request`, which must hold `host`, with those that make it acceptable to `refusal`."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {**request.headers, "x-amz-date": stamp}
    names = ["host", "x-amz-date"]
    stamped = Request(request.method, request.path, request.query, headers, request.body)
    claimed = request.headers.get("x-amz-content-sha256") or hashlib.sha256(request.body or b"").hexdigest()
    signature = _signature(stamped, key, stamp, region, service, names, claimed)
    scope = f"{key.access_key}/{stamp[:8]}/{region}/{service}/aws4_request"
    authorization = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return {**headers, "authorization": authorization}


def _signature(
    request: Request, key: Key, stamp: str, region: str, service: str, names: list[str], body_hash: str
) -> str:
    # every service but S3 encodes the path a second time
    path = request.path if service == "s3" else quote(request.path, safe="/~-_.")
    pairs = sorted(
        (quote(name, safe="~-_."), quote(value, safe="~-_."))
        for name, value in parse_qsl(request.query, keep_blank_values=True)
    )
    canonical = "\n".join(
        [
            request.method,
            path or "/",
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in names),
            "",
            ";".join(names),
            body_hash,
        ]
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    secret = f"AWS4{key.secret_key}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    return hmac.digest(secret, text.encode(), "sha256").hex()
