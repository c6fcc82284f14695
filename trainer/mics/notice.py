"""The spot notice: EC2 tells an instance about two minutes ahead that it takes it back.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping

ENDPOINT = "http://169.254.169.254"
POLL_SECONDS = 5.0  # what AWS recommends
ANSWER_SECONDS = 1.0  # the service is on the instance itself
TOKEN_SECONDS = 21600
SILENT_ANSWERS = 3  # at the start, until this machine is taken for one without metadata

# Straight to the instance's own service: a proxy of the environment would answer for another machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Notice:
    """Asks the metadata service on a thread of its own; one per node is enough. `stop` it at the end."""

    def __init__(self, environment: Mapping[str, str], poll_seconds: float = POLL_SECONDS) -> None:
        self._endpoint = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ENDPOINT).rstrip("/")
        self._poll_seconds = poll_seconds
        self._arrived: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mics-notice", daemon=True)
        if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
            self._thread.start()

    @property
    def arrived(self) -> str | None:
        """ "spot interruption (terminate) at 12:04:11Z", or None while there is no notice."""
        return self._arrived

    @property
    def watching(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Returns once the thread has ended: at most after the answer that it waits for."""
        self._ended.set()
        if self.watching:
            self._thread.join()

    def _watch(self) -> None:
        token, silent, ever_answered = "", 0, False
        while not self._ended.is_set():
            try:
                token = token or _new_token(self._endpoint)
                self._arrived = _interruption(self._endpoint, token)
                silent, ever_answered = 0, True
            except (OSError, ValueError):  # no service here, a busy one, or a token that has run out
                token, silent = "", silent + 1
            if self._arrived or (silent >= SILENT_ANSWERS and not ever_answered):
                return
            self._ended.wait(self._poll_seconds)


def _new_token(endpoint: str) -> str:
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
    return _answer(urllib.request.Request(f"{endpoint}/latest/api/token", method="PUT", headers=seconds))


def _interruption(endpoint: str, token: str) -> str | None:
    """What the service says now. Raises OSError where it does not answer, ValueError where it says something else."""
    path = f"{endpoint}/latest/meta-data/spot/instance-action"
    try:
        text = _answer(urllib.request.Request(path, headers={"X-aws-ec2-metadata-token": token}))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # the usual answer: nothing planned
            return None
        raise
    return describe(text)


def _answer(request: urllib.request.Request) -> str:
    with _opener.open(request, timeout=ANSWER_SECONDS) as answer:
        body: bytes = answer.read()
    return body.decode()


def describe(text: str) -> str:
    """One line for {"action": "terminate", "time": "2017-09-18T08:22:00Z"}. Raises ValueError for other texts. Pure."""
    try:
        notice = json.loads(text)
        return f"spot interruption ({notice['action']}) at {notice['time'].partition('T')[2]}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no spot notice: {text!r}") from error
