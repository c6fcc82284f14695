"""S3, the one place of mics that imports boto3 and smart_open, and only where a run names an s3:// path.

Credentials, region and endpoint come the way boto3 finds them: the environment (AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3),
the shared config files, or the instance's role (AWS_EC2_METADATA_SERVICE_ENDPOINT).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from mics.errors import RunRefusedError

SCHEME = "s3://"
METADATA_SECONDS, METADATA_ATTEMPTS = 5, 4
READ_BYTES = 8 << 20  # one range request; sequential reads ask for as much at a time
PART_BYTES = 64 << 20  # of a multipart upload: memory of each open writer, and 10,000 parts = 625 GiB a file at most

S3Client = Any  # boto3 makes its client classes at run time


def is_s3(path: str) -> bool:
    return path.startswith(SCHEME)


def split_url(url: str) -> tuple[str, str]:
    """ "s3://bucket/some/key" to ("bucket", "some/key"). Raises RunRefusedError for anything else. Pure."""
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not is_s3(url) or not bucket:
        raise RunRefusedError(f"{url!r} is no S3 name; write s3://bucket/name")
    return bucket, key


def s3() -> S3Client:
    """A client that retries throttled and broken requests. Keep it: making one takes a tenth of a second.

    Raises RunRefusedError where boto3 or smart_open is not installed.
    """
    try:
        import boto3
        import botocore.session
        import smart_open  # noqa: F401  (said now, not at the first write)
        from botocore.config import Config
    except ImportError as error:
        raise RunRefusedError(f"s3:// needs boto3 and smart_open on every node: {error}. pip install micsctl") from None
    own_endpoint = "AWS_ENDPOINT_URL" in os.environ or "AWS_ENDPOINT_URL_S3" in os.environ
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 8},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=32,
        s3={"addressing_style": "path"} if own_endpoint else None,  # only AWS's hosts have bucket names
    )
    # botocore asks the metadata service once, for a second: too little where all ranks of a node ask it at one time.
    session = botocore.session.get_session()
    session.set_config_variable("metadata_service_timeout", METADATA_SECONDS)
    session.set_config_variable("metadata_service_num_attempts", METADATA_ATTEMPTS)
    with readable("S3"):
        return boto3.Session(botocore_session=session).client("s3", config=config)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn boto3's errors inside into one RunRefusedError that says why S3 refuses `what`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        said = error.response.get("Error", {})
        code, message = said.get("Code", "unknown"), said.get("Message", "")
        raise RunRefusedError(f"{what}: S3 refused {error.operation_name}: {code} {message}".rstrip()) from error
    except BotoCoreError as error:
        raise RunRefusedError(f"{what}: {' '.join(str(error).split())}") from error


def open_s3(client: S3Client, url: str, mode: str) -> IO[bytes]:
    """A binary stream: "rb" reads and seeks with range requests, "wb" is a multipart upload.

    An upload exists once it is closed without an exception; an exception inside its `with` aborts it.
    """
    if mode == "wb":
        import smart_open

        settings = {"client": client, "min_part_size": PART_BYTES}
        try:
            stream: IO[bytes] = smart_open.open(url, "wb", compression="disable", transport_params=settings)
        except ValueError as error:  # smart_open's word for a bucket that refuses; boto3's own says why
            raise (error.__cause__ or error) from None
        return stream
    if mode == "rb":
        return io.BufferedReader(RangeReader(client, url), READ_BYTES)
    raise ValueError(f"mode must be rb or wb, got {mode!r}")


class RangeReader(io.RawIOBase):
    """One S3 object; each read is one range request."""

    def __init__(self, client: S3Client, url: str) -> None:
        self._client, self._url = client, url
        self._bucket, self._key = split_url(url)
        with readable(url):
            self.size_bytes: int = client.head_object(Bucket=self._bucket, Key=self._key)["ContentLength"]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.size_bytes - self._at)
        if wanted <= 0:
            return 0
        spread = f"bytes={self._at}-{self._at + wanted - 1}"
        with readable(self._url):
            body = self._client.get_object(Bucket=self._bucket, Key=self._key, Range=spread)["Body"]
            buffer[:wanted] = body.read()
        self._at += wanted
        return wanted
