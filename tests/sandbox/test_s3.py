"""The emulated S3 without hosts: what boto3 does with it, and what the sandbox changed in moto; roles; contents."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from micsctl.home import Home
from micsctl.sandbox.application import Application
from micsctl.sandbox.auth import Key, Request, sign
from micsctl.sandbox.contents import Content, joined, store
from micsctl.sandbox.control import SandboxInfo
from micsctl.sandbox.faults import FaultBook
from micsctl.sandbox.roles import RoleKeys

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]
MIB = 1 << 20
DATA = os.urandom(13 * MIB)
Sandbox = tuple[Home, SandboxInfo]


@pytest.fixture(scope="module")
def s3(hostless: Sandbox, client: Callable[..., Any]) -> Any:
    made = client(hostless[1], "s3")
    made.create_bucket(Bucket="bucket")
    return made


@pytest.fixture
def objects(hostless: Sandbox, s3: Any) -> Iterator[Path]:
    """The folder of what is in S3; empty again when the bucket is."""
    folder = hostless[0].sandbox / "s3"
    yield folder
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        if keys := [{"Key": one["Key"]} for one in page.get("Contents", [])]:
            assert "Errors" not in s3.delete_objects(Bucket="bucket", Delete={"Objects": keys})
    assert list(folder.iterdir()) == []


def code(call: Callable[[], Any]) -> tuple[str, int]:
    with pytest.raises(ClientError) as raised:
        call()
    return raised.value.response["Error"]["Code"], raised.value.response["ResponseMetadata"]["HTTPStatusCode"]


def get(s3: Any, key: str, **more: Any) -> bytes:
    found: bytes = s3.get_object(Bucket="bucket", Key=key, **more)["Body"].read()
    return found


@pytest.mark.parametrize("size", [0, 1, (64 << 10) + 1, 13 * MIB])
def test_an_object_comes_back_whole_and_in_ranges(s3: Any, objects: Path, size: int) -> None:
    key, body = "a b/ä=1+2/%41~//x", DATA[:size]
    put = s3.put_object(Bucket="bucket", Key=key, Body=body, Metadata={"step": "3"})
    head = s3.head_object(Bucket="bucket", Key=key)
    assert (head["ContentLength"], head["Metadata"]) == (size, {"step": "3"})
    assert put["ETag"] == head["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    assert get(s3, key) == body
    if size > 1:
        assert get(s3, key, Range="bytes=1000-70000") == body[1000:70001]
        assert get(s3, key, Range="bytes=-5") == body[-5:]
        assert get(s3, key, Range=f"bytes={size - 2}-") == body[-2:]
    assert code(lambda: get(s3, key, Range=f"bytes={size}-"))[0] == "InvalidRange"


def test_parts_become_one_object(s3: Any, objects: Path, tmp_path: Path) -> None:
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    s3.upload_fileobj(io.BytesIO(DATA), "bucket", "many", Config=config)
    assert s3.head_object(Bucket="bucket", Key="many")["ETag"].endswith('-3"')
    s3.download_file("bucket", "many", str(tmp_path / "many"), Config=config)
    assert (tmp_path / "many").read_bytes() == DATA
    assert get(s3, "many", Range=f"bytes={5 * MIB - 3}-{10 * MIB + 3}") == DATA[5 * MIB - 3 : 10 * MIB + 4]
    assert len(list(objects.iterdir())) == 3  # joined without a copy
    s3.copy({"Bucket": "bucket", "Key": "many"}, "bucket", "twin", Config=config)
    s3.copy_object(Bucket="bucket", Key="third", CopySource="bucket/many", ChecksumAlgorithm="SHA256")
    s3.delete_object(Bucket="bucket", Key="many")
    assert get(s3, "twin") == get(s3, "third") == DATA


def test_uploads_that_are_not_finished(s3: Any, objects: Path) -> None:
    def begin() -> dict[str, Any]:
        named = {"Bucket": "bucket", "Key": "never"}
        return {**named, "UploadId": s3.create_multipart_upload(**named)["UploadId"]}

    upload = begin()
    etags = [s3.upload_part(**upload, PartNumber=n, Body=DATA[: 5 * MIB])["ETag"] for n in (1, 2)]
    assert [part["Size"] for part in s3.list_parts(**upload)["Parts"]] == [5 * MIB] * 2
    assert [one["Key"] for one in s3.list_multipart_uploads(Bucket="bucket")["Uploads"]] == ["never"]
    wrong = {"Parts": [{"PartNumber": 1, "ETag": etags[0]}, {"PartNumber": 2, "ETag": '"0"'}]}
    assert code(lambda: s3.complete_multipart_upload(**upload, MultipartUpload=wrong))[0] == "InvalidPart"
    s3.abort_multipart_upload(**upload)
    assert list(objects.iterdir()) == []
    small = begin()
    parts = [
        {"PartNumber": n, "ETag": s3.upload_part(**small, PartNumber=n, Body=b"x" * 100_000)["ETag"]} for n in (1, 2)
    ]
    assert code(lambda: s3.complete_multipart_upload(**small, MultipartUpload={"Parts": parts}))[0] == "EntityTooSmall"
    s3.abort_multipart_upload(**small)
    assert code(lambda: get(s3, "never")) == ("NoSuchKey", 404)


def test_lists_have_pages_and_folders(s3: Any, objects: Path) -> None:
    names = [f"run/{step}/{rank}" for step in range(4) for rank in range(3)]
    for name in names:
        s3.put_object(Bucket="bucket", Key=name, Body=b"")
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="bucket", Prefix="run/", PaginationConfig={"PageSize": 5}
    )
    assert [one["Key"] for page in pages for one in page["Contents"]] == sorted(names)
    listed = s3.list_objects_v2(Bucket="bucket", Prefix="run/", Delimiter="/")
    assert [one["Prefix"] for one in listed["CommonPrefixes"]] == [f"run/{step}/" for step in range(4)]
    if_new = {"Bucket": "bucket", "Key": names[0], "Body": b"1", "IfNoneMatch": "*"}
    assert code(lambda: s3.put_object(**if_new)) == ("PreconditionFailed", 412)


def test_a_download_outlives_its_object(s3: Any, objects: Path) -> None:
    s3.put_object(Bucket="bucket", Key="old", Body=DATA)
    body = s3.get_object(Bucket="bucket", Key="old")["Body"]
    first = body.read(MIB)
    s3.put_object(Bucket="bucket", Key="old", Body=b"new")
    assert first + body.read() == DATA


def test_unsigned_bodies_and_bodies_in_pieces(s3: Any, hostless: Sandbox, client: Callable[..., Any]) -> None:
    """As SDKs send them that sign neither the body nor the whole of it."""
    body = DATA[:100_000]
    url = s3.meta.endpoint_url + "/bucket/other"
    pieces = b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in (body[:70_000], body[70_000:])) + b"0\r\n\r\n"
    for claim, sent, more in (
        ("UNSIGNED-PAYLOAD", body, {}),
        ("STREAMING-UNSIGNED-PAYLOAD-TRAILER", pieces, {"x-amz-decoded-content-length": str(len(body))}),
    ):
        answer = raw(hostless[1], "PUT", url, sent, {"x-amz-content-sha256": claim, **more})
        assert answer == 200
        assert get(s3, "other") == body
    s3.delete_object(Bucket="bucket", Key="other")


def raw(info: SandboxInfo, method: str, url: str, body: bytes, headers: dict[str, str]) -> int:
    """Status of a request whose headers are signed, with whatever body."""
    signed = signed_headers(info, method, url, headers)
    sent = urllib.request.Request(url, data=body, method=method, headers={"content-type": "a/b", **signed})
    try:
        with urllib.request.urlopen(sent, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def signed_headers(info: SandboxInfo, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
    where, settings = urlsplit(url), info.settings
    assert settings.access_key
    assert settings.secret_key
    request = Request(method, where.path, "", {"host": where.netloc, **headers}, None)
    return sign(request, Key(settings.access_key, settings.secret_key), datetime.now(UTC), service="s3")


def test_another_body_than_the_signed_one_is_not_stored(s3: Any, hostless: Sandbox) -> None:
    url = s3.meta.endpoint_url + "/bucket/forged"
    claim = {"x-amz-content-sha256": hashlib.sha256(b"signed").hexdigest()}
    for body in (b"forged", DATA[:100_000]):
        assert raw(hostless[1], "PUT", url, body, claim) == 400
    assert code(lambda: get(s3, "forged")) == ("NoSuchKey", 404)


def test_half_a_body_is_not_stored(s3: Any, hostless: Sandbox) -> None:
    """A rank that is killed while it writes must not leave an object."""
    url = f"{hostless[1].settings.endpoint_url}/bucket/half"
    where = urlsplit(url)
    headers = {"x-amz-content-sha256": "UNSIGNED-PAYLOAD", "content-length": "100000"}
    signed = signed_headers(hostless[1], "PUT", url, headers)
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        lines = [f"{name}: {value}" for name, value in signed.items()]
        connection.sendall("\r\n".join(["PUT /bucket/half HTTP/1.1", *lines, "", ""]).encode() + b"x" * 70_000)
        connection.shutdown(socket.SHUT_WR)
        assert b"IncompleteBody" in connection.makefile("rb").read()
    assert code(lambda: get(s3, "half")) == ("NoSuchKey", 404)


def test_only_keys_open_it(s3: Any, hostless: Sandbox) -> None:
    settings = hostless[1].settings

    def with_key(access_key: str | None, secret_key: str | None, token: str | None = None) -> Any:
        return boto3.client(
            "s3",
            "us-east-1",
            endpoint_url=settings.endpoint_url,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            aws_session_token=token,
            config=Config(retries={"total_max_attempts": 1}),
        )

    for who, expected in (
        (with_key("AKIA0000000000000000", settings.secret_key), ("InvalidAccessKeyId", 403)),
        (with_key(settings.access_key, "wrong"), ("SignatureDoesNotMatch", 403)),
        (with_key(settings.access_key, settings.secret_key, "made.up"), ("InvalidToken", 400)),
    ):
        assert code(who.list_buckets) == expected
        assert code(partial(who.put_object, Bucket="bucket", Key="x", Body=DATA)) == expected
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{settings.endpoint_url}/bucket", timeout=5)
    assert raised.value.code == 401


# --- roles


def test_role_credentials_are_renewed_long_before_they_end() -> None:
    keys, now = RoleKeys(), datetime(2026, 1, 1, 12, 30, tzinfo=UTC)
    first = keys.credentials("i-1", "mics-nodes", now)
    assert first == keys.credentials("i-1", "mics-nodes", now + timedelta(minutes=29)) == keys.find(first.token)
    assert first.starts_at <= now
    assert timedelta(hours=5) < first.ends_at - now <= timedelta(hours=6)
    others = [
        keys.credentials("i-2", "mics-nodes", now),
        keys.credentials("i-1", "other", now),
        keys.credentials("i-1", "mics-nodes", now + timedelta(hours=1)),
        RoleKeys().credentials("i-1", "mics-nodes", now),
    ]
    assert (
        len({one.key.secret_key for one in [first, *others]} | {one.key.access_key for one in [first, *others]}) == 10
    )
    assert RoleKeys().find(first.token) is None
    assert keys.find("") is None
    assert keys.find(first.token[:-1] + ("0" if first.token[-1] != "0" else "1")) is None


@pytest.mark.parametrize(
    ("service", "hours", "expected"),
    [
        ("s3", 0, "200"),
        ("s3", 7, "400 ExpiredToken"),
        ("ec2", 0, "403 UnauthorizedOperation"),
        ("ec2", 7, "401 AuthFailure"),
    ],
)
def test_a_role_may_use_s3_until_its_credentials_end(service: str, hours: int, expected: str) -> None:
    def emulated(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return [b""]

    key, roles = Key("AKIAABCDEFGHIJKLMNOP", "secret"), RoleKeys()
    application = Application(key, roles, FaultBook(), emulated, emulated, contextlib.nullcontext(), dict)  # type: ignore[arg-type]
    now = datetime.now(UTC)
    mine = roles.credentials("i-1", "mics-nodes", now - timedelta(hours=hours))
    headers = {"host": "127.0.0.1", "x-amz-security-token": mine.token}
    headers |= {"x-amz-content-sha256": hashlib.sha256(b"").hexdigest()}
    request = Request("POST", "/", "", headers, b"")
    environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "wsgi.input": io.BytesIO()}
    for name, value in sign(request, mine.key, now, service=service).items():
        environ[f"HTTP_{name.replace('-', '_').upper()}"] = value
    seen: list[str] = []
    body = b"".join(application(environ, lambda status, _: seen.append(status))).decode()
    status, _, wanted = expected.partition(" ")
    assert seen[0].startswith(status)
    assert f"<Code>{wanted}</Code>" in body or not wanted


# --- contents


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=30), max_size=5), start=st.integers(-70, 160), stop=st.integers(-70, 160))
def test_contents_read_like_bytes(parts: list[bytes], start: int, stop: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole: Content | None = joined(store(folder, [part]) for part in parts)
    assert whole is not None
    expected = b"".join(parts)
    assert (len(whole), bytes(whole), whole.md5) == (len(expected), expected, hashlib.md5(expected).hexdigest())
    assert bytes(whole[start:stop]) == expected[start:stop]
    assert bytes(whole[1:][start:stop]) == expected[1:][start:stop]


def test_the_file_goes_with_its_last_content(tmp_path: Path) -> None:
    content = store(tmp_path, [b"ab", b"cd"])
    middle = content[1:3]
    del content
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abcd"]
    assert bytes(middle) == b"bc"
    del middle
    assert list(tmp_path.iterdir()) == []
