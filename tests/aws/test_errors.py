from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
    ReadTimeoutError,
    TokenRetrievalError,
    WaiterError,
)

from micsctl.aws.errors import AwsError, explain, outcome_unknown
from micsctl.errors import CapacityError, CredentialsError, ExitCode, MicsctlError, PermissionDenied, UsageError


def answer(code: str, message: str = "words", *, status: int = 400, date: datetime | None = None) -> ClientError:
    metadata: dict[str, Any] = {"RequestId": "req-1", "HTTPStatusCode": status, "HTTPHeaders": {}}
    if date:
        metadata["HTTPHeaders"]["date"] = format_datetime(date, usegmt=True)
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, "RunInstances")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", CapacityError),
        ("InsufficientHostCapacity", CapacityError),
        ("ReservationCapacityExceeded", CapacityError),
        ("UnfulfillableCapacity", CapacityError),
        ("SpotMaxPriceTooLow", CapacityError),
        ("Unsupported", CapacityError),
        ("VcpuLimitExceeded", PermissionDenied),
        ("InstanceLimitExceeded", PermissionDenied),
        ("MaxSpotInstanceCountExceeded", PermissionDenied),
        ("AddressLimitExceeded", PermissionDenied),
        ("VpcLimitExceeded", PermissionDenied),
        ("UnauthorizedOperation", PermissionDenied),
        ("AccessDeniedException", PermissionDenied),
        ("OptInRequired", PermissionDenied),
        ("PendingVerification", PermissionDenied),
        ("ExpiredToken", CredentialsError),
        ("ExpiredTokenException", CredentialsError),
        ("RequestExpired", CredentialsError),
        ("InvalidClientTokenId", CredentialsError),
        ("AuthFailure", CredentialsError),
        ("SignatureDoesNotMatch", CredentialsError),
        ("RequestLimitExceeded", MicsctlError),
        ("DependencyViolation", MicsctlError),
        ("InvalidKeyPair.Duplicate", MicsctlError),
        ("InvalidParameterCombination", MicsctlError),
        ("SomethingNew", MicsctlError),
    ],
)
def test_class_goes_by_code_and_names_code_and_request(code: str, kind: type[MicsctlError]) -> None:
    error = explain(answer(code, "whatever AWS says"), "start the machines")
    assert type(error) is kind
    assert error.what == "could not start the machines"
    assert "whatever AWS says" in error.why
    assert code in error.why
    assert "req-1" in error.why


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (NoCredentialsError(), CredentialsError),
        (ProfileNotFound(profile="x"), CredentialsError),
        (TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"), CredentialsError),
        (NoRegionError(), UsageError),
        (EndpointConnectionError(endpoint_url="https://ec2.us-west-9.amazonaws.com/"), MicsctlError),
        (ReadTimeoutError(endpoint_url="https://ec2"), MicsctlError),
        (WaiterError(name="InstanceRunning", reason="Max attempts exceeded", last_response={}), MicsctlError),
    ],
)
def test_errors_without_an_answer(raised: AwsError, kind: type[MicsctlError]) -> None:
    error = explain(raised, "list the instances")
    assert type(error) is kind
    assert error.why


@pytest.mark.parametrize(("offset_seconds", "words"), [(412, "behind"), (-412, "ahead of")])
def test_a_wrong_clock_is_named_with_its_seconds(offset_seconds: int, words: str) -> None:
    error = explain(answer("RequestExpired", date=datetime.now(UTC) + timedelta(seconds=offset_seconds)), "look")
    assert isinstance(error, CredentialsError)
    seconds = re.search(rf"clock is (\d+) s {words}", error.why)
    assert seconds
    assert abs(int(seconds[1]) - 412) <= 2
    assert "clock" in error.next


def test_a_right_clock_points_to_the_credentials() -> None:
    error = explain(answer("RequestExpired", date=datetime.now(UTC)), "look")
    assert "so it is the credentials" in error.why
    assert "login" in error.next


@pytest.mark.parametrize("header", [None, "no date", "Sun, 29 Nov 2026 20:26:13"])
def test_an_unreadable_date_does_not_hide_the_error(header: str | None) -> None:
    raised = answer("ExpiredToken")
    if header:
        raised.response["ResponseMetadata"]["HTTPHeaders"]["date"] = header
    assert isinstance(explain(raised, "look"), CredentialsError)


def test_an_encoded_message_is_cut() -> None:
    blob = "Ab3_-" * 150
    error = explain(answer("UnauthorizedOperation", f"You are not authorized. Encoded message: {blob}"), "look")
    assert blob not in error.why
    assert "750 encoded characters" in error.why


@pytest.mark.parametrize(
    ("raised", "unknown"),
    [
        (answer("InternalError", status=500), True),
        (answer("Unavailable", status=503), True),
        (answer("InsufficientInstanceCapacity", status=500), False),
        (answer("RequestLimitExceeded", status=503), False),
        (answer("VcpuLimitExceeded"), False),
        (ReadTimeoutError(endpoint_url="https://ec2"), True),
        (NoCredentialsError(), False),
    ],
)
def test_whether_aws_may_have_done_it(raised: AwsError, unknown: bool) -> None:
    assert outcome_unknown(raised) is unknown


_EXIT_CODES = {
    "AddressLimitExceeded": ExitCode.QUOTA_OR_PERMISSION,
    "ExpiredToken": ExitCode.CREDENTIALS,
    "InstanceLimitExceeded": ExitCode.QUOTA_OR_PERMISSION,
    "InsufficientInstanceCapacity": ExitCode.CAPACITY,
    "InvalidClientTokenId": ExitCode.CREDENTIALS,
    "MaxSpotInstanceCountExceeded": ExitCode.QUOTA_OR_PERMISSION,
    "OptInRequired": ExitCode.QUOTA_OR_PERMISSION,
    "PendingVerification": ExitCode.QUOTA_OR_PERMISSION,
    "RequestExpired": ExitCode.CREDENTIALS,
    "ReservationCapacityExceeded": ExitCode.CAPACITY,
    "SpotMaxPriceTooLow": ExitCode.CAPACITY,
    "UnauthorizedOperation": ExitCode.QUOTA_OR_PERMISSION,
    "UnfulfillableCapacity": ExitCode.CAPACITY,
    "Unsupported": ExitCode.CAPACITY,
    "VcpuLimitExceeded": ExitCode.QUOTA_OR_PERMISSION,
}


@pytest.mark.skipif("MICSCTL_SAMPLES" not in os.environ, reason="MICSCTL_SAMPLES names no folder of AWS's error texts")
def test_real_texts() -> None:
    """Each file: a `# source` line, then the text as a client printed it."""
    folder = Path(os.environ["MICSCTL_SAMPLES"]) / "errors"
    seen = set()
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text().split("\n", 1)[1].strip()
        match = re.search(r"\((\w[\w.]+)\) when calling", text) or re.match(
            r"(?:api error )?([A-Z][\w.]+?)(?::|$)", text
        )
        code = match[1] if match else path.name.split("_")[0].removesuffix(".txt")
        error = explain(answer(code, text), "do it")
        expected = _EXIT_CODES.get(code, ExitCode.FAILURE)
        if path.stem not in {"EndpointConnectionError", "NoCredentialsError", "NoRegionError", "WaiterError"}:
            assert error.exit_code == expected, path.name
        if "https://" in text:
            assert re.search(r"https://\S+", text)[0] in error.why  # type: ignore[index]
        seen.add(code)
    assert set(_EXIT_CODES) <= seen
