"""The spot notice, against an instance metadata service on loopback."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mics.notice import SILENT_ANSWERS, Notice, describe

NOTICE = json.dumps({"action": "terminate", "time": "2026-09-18T08:22:00Z"})


class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self):
        assert self.path == "/secret/i-1/latest/api/token"
        self.server.tokens += 1
        self.answer(200, f"token-{self.server.tokens}")

    def do_GET(self):
        assert self.path == "/secret/i-1/latest/meta-data/spot/instance-action"
        self.server.asked.set()
        if self.headers["X-aws-ec2-metadata-token"] != f"token-{self.server.tokens}" or self.server.forget:
            self.server.forget = False
            self.answer(401, "")
        elif self.server.notice:
            self.answer(200, self.server.notice)
        else:
            self.answer(404, "")

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.tokens, server.notice, server.forget, server.asked = 0, "", False, threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def wait_for(condition, deadline_s=20):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watch(server, **environment):
    endpoint = f"http://127.0.0.1:{server.server_port}/secret/i-1/"
    return Notice({"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint, **environment}, poll_seconds=0.02)


def test_the_notice_arrives_once_the_service_has_one_and_the_asking_ends(service):
    notice = watch(service)
    assert service.asked.wait(20)
    service.asked.clear()
    assert service.asked.wait(20)
    assert (notice.arrived, notice.watching, service.tokens) == (None, True, 1)
    service.forget = True  # the token has run out
    wait_for(lambda: service.tokens == 2)
    service.notice = NOTICE
    wait_for(lambda: notice.arrived)
    assert notice.arrived == "spot interruption (terminate) at 08:22:00Z"
    wait_for(lambda: not notice.watching)


def test_a_watcher_can_be_stopped(service):
    notice = watch(service)
    assert service.asked.wait(20)
    notice.stop()
    assert (notice.watching, notice.arrived) == (False, None)


def test_a_machine_without_metadata_is_asked_a_few_times_only(service, monkeypatch):
    asked = []

    def nobody(endpoint):
        asked.append(endpoint)
        raise OSError

    monkeypatch.setattr("mics.notice._new_token", nobody)
    notice = watch(service)
    wait_for(lambda: not notice.watching)
    assert len(asked) == SILENT_ANSWERS
    notice.stop()


def test_metadata_can_be_switched_off(service):
    assert not watch(service, AWS_EC2_METADATA_DISABLED="true").watching


@pytest.mark.parametrize("text", ["", "<html>", "[]", "{}", '{"action": "stop"}', '{"action": "stop", "time": 3}'])
def test_other_answers_are_no_notice(text):
    with pytest.raises(ValueError, match="no spot notice"):
        describe(text)
