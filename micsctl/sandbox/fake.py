"""No hosts: instances that only pretend. For tests of the emulated EC2 itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from micsctl.sandbox.hosts import HostEnded, HostRequest

_CONSOLE = """\
-----BEGIN SSH HOST KEY KEYS-----\r
ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG1pY3NjdGwgc2FuZGJveCB3aXRob3V0IGhvc3Rz root@fake\r
-----END SSH HOST KEY KEYS-----\r
"""


class FakeHosts:
    """Instances run a moment after they are started, and end a moment after they are stopped."""

    level = "none"
    ssh_user: str | None = None
    ssh_port = 22
    vpc_cidr = "10.77.0.0/16"
    public_cidr = "198.18.77.0/24"
    caller_cidr = "198.18.76.1/32"

    def __init__(self, boot_seconds: float = 0.5, end_seconds: float = 0.1) -> None:
        self._boot_seconds, self._end_seconds = boot_seconds, end_seconds
        self._ended = dict[str, HostEnded]()
        self._running = set[str]()
        self.routes = dict[str, str]()

    def start(self, requests: Sequence[HostRequest], on_running: Callable[[str], None], on_ended: HostEnded) -> None:
        for request in requests:
            self._ended[request.instance_id] = on_ended
            self._later(self._boot_seconds, self._boot, request.instance_id, on_running)

    def stop(self, instance_ids: Sequence[str]) -> None:
        for instance_id in instance_ids:
            self._running.discard(instance_id)
            if on_ended := self._ended.pop(instance_id, None):
                self._later(self._end_seconds, on_ended, instance_id)

    def console(self, instance_id: str) -> str:
        return _CONSOLE if instance_id in self._running else ""

    def ssh_ready(self, instance_id: str) -> bool:
        return instance_id in self._running

    def route(self, public_ip: str, instance_id: str | None) -> None:
        self.routes.pop(public_ip, None)
        if instance_id:
            self.routes[public_ip] = instance_id

    def close(self) -> None:
        self._running.clear()

    def _boot(self, instance_id: str, on_running: Callable[[str], None]) -> None:
        if instance_id in self._ended:
            self._running.add(instance_id)
            on_running(instance_id)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        timer = threading.Timer(seconds, call, arguments)
        timer.daemon = True
        timer.start()
