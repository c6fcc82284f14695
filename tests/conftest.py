"""Settings of every test: a busy machine is no failure, and Ctrl-C arrives however the tests were started."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("micsctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("micsctl")

# A shell starts what it puts into the background with Ctrl-C ignored, and that is inherited by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
