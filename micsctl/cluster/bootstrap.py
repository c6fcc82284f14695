"""The user data of the nodes."""

from __future__ import annotations

import shlex
from datetime import datetime

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from micsctl import resources

TORCH_VERSION = "2.13.0"
USER_DATA_LIMIT_BYTES = 16_384


def render_bootstrap(
    *, cluster: str, ssh_user: str, ends_at: datetime, check_seconds: float = 60, torch_version: str = TORCH_VERSION
) -> str:
    """A bash script that makes a node what docs/architecture.md says it is after `up`. It holds no secret.

    It looks every `check_seconds` whether the node's end has come.
    """
    environment = Environment(
        loader=FileSystemLoader(resources.templates()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # bash, not HTML; texts go through `quote`
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template("bootstrap.sh.j2").render(
        cluster=cluster,
        user=ssh_user,
        ends_at=int(ends_at.timestamp()),
        check_seconds=check_seconds,
        torch_version=torch_version,
    )
