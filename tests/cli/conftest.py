from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from micsctl.cli.signals import ENDING


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """`main` sets signal handlers for the rest of its process, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
