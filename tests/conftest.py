"""Settings of every test: a busy machine is no failure, and Ctrl-C arrives however the tests were started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("micsctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("micsctl")

# A shell starts what it puts into the background with Ctrl-C ignored, and that is inherited by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def interrupted_as_threads_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Calls; Ctrl-C comes as soon as a thread runs. None may live on: it would keep the process from ending."""

    def check(call: Callable[[], object]) -> None:
        before, start = set(threading.enumerate()), threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            call()
        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=5)
            assert not thread.is_alive(), caught  # whose traceback keeps alive what the thread waits for

    return check
