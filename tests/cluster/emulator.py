"""The emulated EC2 without hosts, in a process of its own: moto can be extended once in a process only.

Prints its port, then answers one JSON line for each on standard input, and ends with it.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

from micsctl.sandbox.ec2.install import install
from micsctl.sandbox.fake import FakeHosts
from micsctl.sandbox.faults import Fault, FaultBook


class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *args: object) -> None:
        pass


faults = FaultBook()
emulator, application = install(FakeHosts(boot_seconds=0.05), faults)


def one_at_a_time(environ: Any, start_response: Any) -> Any:  # moto is not made for threads
    with emulator.lock:
        return application(environ, start_response)


server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)


def forget_terminated_instances() -> None:
    """AWS does so after an hour."""
    with emulator.lock:
        for backend in emulator.backends():
            backend.reservations = {
                id: reservation
                for id, reservation in backend.reservations.items()
                if any(instance.state != "terminated" for instance in reservation.instances)
            }


for line in sys.stdin:
    request = json.loads(line)
    if "fault" in request:
        faults.add(Fault(**request["fault"]))
    elif "clear" in request:
        faults.clear()
        forget_terminated_instances()
    elif "end" in request:
        emulator.ended(request["end"])
    print(json.dumps(emulator.resources()), flush=True)
