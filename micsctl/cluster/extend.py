"""The nodes' own end. A root loop on each node reads a file that the login user owns, so nothing here needs root."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from micsctl.remote.fanout import each
from micsctl.remote.host import Host

_FILE = ".micsctl/ends_at"


def read_ends_at(hosts: Sequence[Host]) -> list[datetime | None]:
    """Each node's end, in the order of `hosts`; None where its file is missing or holds no number."""
    return [_parse(text) for text in each(hosts, lambda host: host.read(_FILE))]


def extend(hosts: Sequence[Host], duration: timedelta, *, planned: datetime) -> datetime:
    """Let every node live `duration` longer than the latest end of any; returns the new end, the same for all.

    `planned` is the end that `up` set; it counts where a node's file does not.
    """
    latest = max((end for end in read_ends_at(hosts) if end is not None), default=planned)
    end = datetime.fromtimestamp(int((latest + duration).timestamp()), UTC)
    each(hosts, lambda host: host.write(_FILE, f"{int(end.timestamp())}\n", mode=0o644))
    return end


def _parse(text: str | None) -> datetime | None:
    """As the nodes read it (templates/bootstrap.sh.j2): ten digits or nothing."""
    match = re.fullmatch(r"[1-9][0-9]{9}", (text or "").strip())
    return datetime.fromtimestamp(int(match[0]), UTC) if match else None
