"""Which settings of the laptop play a part in a request, and which must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from micsctl.aws.session import connect
from micsctl.aws.settings import AwsSettings
from micsctl.errors import CredentialsError

_NOWHERE = "http://127.0.0.1:9"
_ANSWER = b'<DescribeVpcsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><vpcSet/></DescribeVpcsResponse>'


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[str]]]:
    """Address of an EC2 with no VPC, and the Authorization headers that it gets."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(str(self.headers["Authorization"]))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(_ANSWER)))
            self.end_headers()
            self.wfile.write(_ANSWER)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def test_a_key_and_an_endpoint_of_ones_own_are_all_that_counts(
    endpoint: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default\nbroken")
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_EC2"):
        monkeypatch.setenv(name, _NOWHERE)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "config"))
    url, seen = endpoint
    aws = connect(AwsSettings("us-east-1", endpoint_url=url, access_key="AKIAMINE", secret_key="secret"))
    assert aws.ec2.describe_vpcs()["Vpcs"] == []
    assert aws.launcher.describe_vpcs()["Vpcs"] == []
    assert all("Credential=AKIAMINE/" in header for header in seen)


def test_without_a_key_the_profile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(CredentialsError, match="set up the AWS clients") as raised:
        connect(AwsSettings("us-east-1"))
    assert "nobody" in raised.value.why
