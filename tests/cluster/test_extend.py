from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from micsctl.cluster.extend import extend, read_ends_at

PLANNED = datetime(2030, 1, 1, tzinfo=UTC)


def test_every_node_gets_the_latest_end_and_more(fake_host: Any) -> None:
    later = PLANNED + timedelta(hours=2)
    hosts = [fake_host(0), fake_host(1), fake_host(2)]
    hosts[1].files[".micsctl/ends_at"] = f"{int(later.timestamp())}\n"
    hosts[2].files[".micsctl/ends_at"] = "rubbish"
    assert read_ends_at(hosts) == [None, later, None]
    end = extend(hosts, timedelta(hours=4), planned=PLANNED)
    assert end == later + timedelta(hours=4)
    assert read_ends_at(hosts) == [end] * 3


def test_without_files_the_planned_end_counts(fake_host: Any) -> None:
    assert extend([fake_host(0)], timedelta(hours=4), planned=PLANNED) == PLANNED + timedelta(hours=4)
