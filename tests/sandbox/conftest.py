"""Sandboxes of a test's own, gone afterwards whatever happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from micsctl.home import Home
from micsctl.sandbox import control
from micsctl.sandbox.control import SandboxInfo
from micsctl.spec import SandboxSpec

Running = Callable[..., contextlib.AbstractContextManager[tuple[Home, SandboxInfo]]]


def _client(info: SandboxInfo, service: str = "ec2", region: str = "us-east-1", **config: Any) -> Any:
    settings = info.settings
    return boto3.client(
        service,
        region_name=region,
        endpoint_url=settings.endpoint_url,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        config=Config(**{"retries": {"total_max_attempts": 1}, **config}),
    )


def _wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.05)
    return answer


@contextlib.contextmanager
def _running(folder: Path, level: str, spec: SandboxSpec | None = None) -> Iterator[tuple[Home, SandboxInfo]]:
    home = Home(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(control.LEVEL_VARIABLE, level)
        try:
            yield home, control.ensure(home, spec or SandboxSpec(), "ubuntu")
        finally:
            control.stop(home)
    assert control.leftovers(home).total == 0


@pytest.fixture(scope="session")
def client() -> Callable[..., Any]:
    """client(info, service="ec2", region="us-east-1", **config): a boto3 client of the sandbox that never retries."""
    return _client


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """wait_for(condition, seconds=30): its first true answer."""
    return _wait_for


@pytest.fixture(scope="session")
def running() -> Running:
    """running(folder, level, spec): a context with a sandbox whose home is `folder`; nothing of it is left after."""
    return _running


@pytest.fixture(scope="module")
def hostless(tmp_path_factory: pytest.TempPathFactory, running: Running) -> Iterator[tuple[Home, SandboxInfo]]:
    """The emulated EC2 without hosts."""
    with running(tmp_path_factory.mktemp("hostless"), "none") as sandbox:
        yield sandbox
