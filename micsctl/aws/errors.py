"""AWS errors in micsctl's words. Classes go by AWS's code, never by its wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeAlias

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from micsctl.errors import CapacityError, CredentialsError, MicsctlError, PermissionDenied, UsageError

AWS_ERRORS = (BotoCoreError, ClientError, ResponseParserError)  # all that a call of a client raises
AwsError: TypeAlias = BotoCoreError | ClientError | ResponseParserError

CAPACITY_CODES = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity",
        "ReservationCapacityExceeded",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",  # "your requested instance type is not supported in your requested Availability Zone"
    }
)
THROTTLING_CODES = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"})
_QUOTA_CODES = frozenset({"MaxSpotInstanceCountExceeded", "AddressLimitExceeded", "Blocked"})
_PERMISSION_CODES = frozenset(
    {
        "UnauthorizedOperation",
        "AccessDenied",
        "AccessDeniedException",
        "OptInRequired",
        "PendingVerification",
        "OperationNotPermitted",
    }
)
_CLOCK_CODES = frozenset(
    {"RequestExpired", "SignatureDoesNotMatch", "AuthFailure", "RequestTimeTooSkewed", "InvalidSignatureException"}
)
_CREDENTIAL_CODES = _CLOCK_CODES | frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "InvalidToken",
        "InvalidAccessKeyId",
        "UnrecognizedClientException",
        "MissingAuthenticationToken",
        "IncompleteSignature",
    }
)
_CLOCK_TOLERANCE_SECONDS = 60
_LOG_IN = "aws sso login   (or renew the keys of your profile), then the same command again"


def code_of(error: BaseException) -> str:
    """AWS's error code, "" for an error that did not come from an AWS answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def request_id_of(error: ClientError) -> str:
    """For a support case; "" where AWS gave none."""
    return str(error.response.get("ResponseMetadata", {}).get("RequestId", ""))


def outcome_unknown(error: AwsError) -> bool:
    """Whether AWS may have done what was asked although the answer is an error: repeat with the same ClientToken."""
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return status >= 500 and code_of(error) not in CAPACITY_CODES | THROTTLING_CODES
    return isinstance(error, HTTPClientError | ConnectionError | ResponseParserError)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn what AWS raises inside the block into a MicsctlError; `doing` reads "create the VPC"."""
    try:
        yield
    except AWS_ERRORS as error:
        raise explain(error, doing) from error


def explain(error: AwsError, doing: str) -> MicsctlError:
    """The MicsctlError for what botocore raised while micsctl was `doing` something."""
    what = f"could not {doing}"
    if isinstance(error, ClientError):
        return _explain_answer(error, what)
    why = _first_line(error)
    if isinstance(error, NoRegionError):
        return UsageError(what, "no AWS region is set", next="set cluster.region in mics.yaml, or AWS_REGION")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return CredentialsError(what, why, next="aws configure   (or set AWS_PROFILE)")
    if isinstance(error, ProfileNotFound):
        return CredentialsError(what, why, next="aws configure list-profiles")
    if isinstance(error, CredentialRetrievalError | TokenRetrievalError | SSOError):
        return CredentialsError(what, why, next=_LOG_IN)
    if isinstance(error, HTTPClientError | ConnectionError):
        return MicsctlError(what, f"{why}\nno network, or no such region", next="check the network and cluster.region")
    return MicsctlError(what, why)


def _explain_answer(error: ClientError, what: str) -> MicsctlError:
    code = code_of(error)
    why = f"{_message(error)}\n{_reference(error)}"
    if code in CAPACITY_CODES:
        return CapacityError(what, why, next="try other zones or another region, or the same command later")
    if code in THROTTLING_CODES:
        return MicsctlError(what, why, next="the same command in a minute: AWS slows this account's requests down")
    if code in _QUOTA_CODES or code.endswith("LimitExceeded"):
        return PermissionDenied(what, why, next="ask for more at https://console.aws.amazon.com/servicequotas")
    if code in _PERMISSION_CODES:
        return PermissionDenied(what, why, next="give the account or the role what AWS names above")
    if code in _CREDENTIAL_CODES:
        return _explain_credentials(error, what, why)
    return MicsctlError(what, why)


def _explain_credentials(error: ClientError, what: str, why: str) -> CredentialsError:
    """Is it the clock or the token? AWS's answer carries the time in its Date header."""
    behind = _clock_behind_seconds(error, datetime.now(UTC))
    if behind is not None and abs(behind) > _CLOCK_TOLERANCE_SECONDS:
        direction = "behind" if behind > 0 else "ahead of"
        clock = f"this machine's clock is {abs(behind):.0f} s {direction} AWS's"
        return CredentialsError(what, f"{why}\n{clock}", next="set this machine's clock, then the same command again")
    if behind is not None and code_of(error) in _CLOCK_CODES:
        why += f"\nthis machine's clock agrees with AWS's ({abs(behind):.0f} s apart), so it is the credentials"
    return CredentialsError(what, why, next=_LOG_IN)


def _clock_behind_seconds(error: ClientError, now: datetime) -> float | None:
    """AWS's time minus ours; None where the answer has no readable Date."""
    header = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        there = parsedate_to_datetime(header)
    except ValueError:
        return None
    return (there - now).total_seconds() if there.tzinfo else None


def _message(error: ClientError) -> str:
    message = str(error.response.get("Error", {}).get("Message", "")) or str(error)
    # an encoded authorization message is several hundred characters that nobody can read
    return re.sub(r"[A-Za-z0-9_-]{100,}", lambda match: f"[{len(match[0])} encoded characters]", message)


def _reference(error: ClientError) -> str:
    request = request_id_of(error)
    return f"AWS code {code_of(error)}" + (f", request {request}" if request else "")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
