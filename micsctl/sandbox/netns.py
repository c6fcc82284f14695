"""Hosts at the netns level (Linux, root): each node is a set of namespaces over this machine's own root.

The server's side. It holds one end of a socket pair whose other end is noded's lifeline, and adds exactly one thing to
this machine: the interface `mics<id>`, which leads to the Elastic IPs and goes away with noded.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from micsctl.errors import MicsctlError, UsageError
from micsctl.sandbox.hosts import HostEnded, HostRequest, HostsSettings
from micsctl.sandbox.state import MARK

_BLOCKS = range(77, 157)  # 10.<block>.0.0/16 is the VPC, 198.18.<block>.0/24 its Elastic IPs (RFC 2544: never routed)
_UNSHARE = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child=SIGKILL"]
_UNSHARE += ["--mount-proc", "--ipc", "--uts"]
_HELLO_SECONDS = 20.0
_END_SECONDS = 10.0
_MEASURE_SECONDS = 0.5
_MEASURED_RATIO = 24  # p3dn: 300 GB/s of NVLink against 12.5 GB/s of network
_PROBE = """
set -e
echo 1 >/proc/sys/net/ipv4/ip_forward
ip link add name va type veth peer name vb
ip link add name br0 type bridge
ip rule add iif vb lookup 100
tc qdisc add dev va root tbf rate 100mbit burst 64k latency 50ms
mount -t tmpfs t /mnt
mkdir /mnt/l /mnt/u /mnt/w /mnt/m
mount -t overlay o -o lowerdir=/mnt/l:/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m
"""


class NetnsHosts:
    """NodeHosts for root on Linux. Raises UsageError where no address block is free."""

    level = "netns"
    ssh_user: str | None = None
    ssh_port = 22

    def __init__(self, settings: HostsSettings, interface: str, hidden: Iterable[Path]) -> None:
        self._settings = settings
        self._interface = interface
        self._block, self._claim = _claim_block()
        self.vpc_cidr = f"10.{self._block}.0.0/16"
        self.public_cidr = f"198.18.{self._block}.0/24"
        self._laptop, self._router = f"198.19.{self._block}.1", f"198.19.{self._block}.2"
        self.caller_cidr = f"{self._laptop}/32"
        self._refused = [self.vpc_cidr]
        self._lock = threading.Lock()
        self._callbacks = dict[str, tuple[Callable[[str], None], HostEnded]]()
        self._ready = set[str]()
        self._process, self._control = self._start_noded(hidden)
        try:
            self.metadata_socket, self.s3_socket = self._greet()
            self._plug_in()
        except BaseException:
            self.close()
            raise
        self.ended = threading.Event()  # noded is gone, and every node with it
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, requests: Sequence[HostRequest], on_running: Callable[[str], None], on_ended: HostEnded) -> None:
        for request in requests:
            self._callbacks[request.instance_id] = (on_running, on_ended)
            self._refuse_directly(request.subnet_cidr)
        self._send(
            do="start",
            nodes=[
                {
                    "instance_id": request.instance_id,
                    "private_ip": request.private_ip,
                    "hostname": request.hostname,
                    "public_key": request.public_key,
                    "user_data": request.user_data.hex(),
                    "subnet_cidr": request.subnet_cidr,
                    "region": request.region,
                }
                for request in requests
            ],
        )

    def stop(self, instance_ids: Sequence[str]) -> None:
        self._send(do="stop", ids=list(instance_ids))

    def console(self, instance_id: str) -> str:
        try:
            text = (self._settings.folder / "consoles" / instance_id).read_bytes()
        except FileNotFoundError:
            return ""
        return text.decode(errors="replace").replace("\n", "\r\n")

    def ssh_ready(self, instance_id: str) -> bool:
        return instance_id in self._ready

    def route(self, public_ip: str, instance_id: str | None) -> None:
        self._send(do="route", public_ip=public_ip, instance_id=instance_id)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # close() would wait for the reader's end
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # it goes by itself with noded's network namespace, but that lives as long as the sockets that listen in it
        subprocess.run(["ip", "link", "delete", self._interface], check=False, capture_output=True)
        self._claim.close()

    def _start_noded(self, hidden: Iterable[Path]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        rate = self._settings.link_mbps
        configuration = {
            "folder": str(self._settings.folder),
            "shared": str(self._settings.shared_folder),
            "user": self._settings.ssh_user,
            "sandbox_id": self._settings.sandbox_id,
            "tbf": token_bucket(rate) if rate else "",
            "hidden": [str(path) for path in hidden],
        }
        ours, theirs = socket.socketpair()
        noded = [sys.executable, "-m", "micsctl.sandbox.noded", str(theirs.fileno()), json.dumps(configuration)]
        with theirs:
            process = subprocess.Popen(
                [*_UNSHARE, *noded],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, MARK: self._settings.sandbox_id},
                start_new_session=True,
            )
        return process, ours

    def _greet(self) -> tuple[socket.socket, socket.socket]:
        """noded's first words come with the sockets of the metadata service and of S3, which listen in its network."""
        self._control.settimeout(_HELLO_SECONDS)
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 2)
        self._control.settimeout(None)
        if not data or len(descriptors) != 2:
            raise MicsctlError("the sandbox's hosts did not start", "noded ended; the log has its reason")
        return socket.socket(fileno=descriptors[0]), socket.socket(fileno=descriptors[1])

    def _plug_in(self) -> None:
        """The one interface on this machine. Private addresses are sent in as well, where they are refused at once."""
        noded = str(self._process.pid)
        _ip(
            f"link add name {self._interface} type veth peer name up0 netns {noded}",
            f"addr add {self._laptop} peer {self._router} dev {self._interface}",
            f"link set {self._interface} up",
            f"route add {self.public_cidr} via {self._router} dev {self._interface}",
            f"route add {self.vpc_cidr} via {self._router} dev {self._interface}",
        )
        self._send(do="uplink", laptop=self._laptop, router=self._router)
        answer = self._control.recv(4096)
        if b"uplinked" not in answer:
            raise MicsctlError("the sandbox's hosts did not start", "noded ended; the log has its reason")

    def _refuse_directly(self, subnet_cidr: str) -> None:
        """Let a connection to a private address fail at once, unless this machine itself uses such addresses."""
        subnet = ipaddress.ip_network(subnet_cidr)
        known = any(subnet.subnet_of(ipaddress.ip_network(block)) for block in self._refused)  # type: ignore[arg-type]
        if not known and not overlapping(subnet_cidr, routes()):
            _ip(f"route add {subnet_cidr} via {self._router} dev {self._interface}")
            self._refused.append(subnet_cidr)

    def _send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # noded is gone: the reader ends every node
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        buffer = b""
        while data := self._receive():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        self.ended.set()
        for instance_id in list(self._callbacks):
            self._end(instance_id)

    def _receive(self) -> bytes:
        try:
            return self._control.recv(1 << 16)
        except OSError:
            return b""

    def _hear(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "running":
                self._callbacks[message["id"]][0](message["id"])
            case "ready":
                self._ready.add(message["id"])
            case "ended":
                self._end(message["id"])
            case "log":
                print(message["text"], file=sys.stderr, flush=True)  # noqa: T201

    def _end(self, instance_id: str) -> None:
        self._ready.discard(instance_id)
        if callbacks := self._callbacks.pop(instance_id, None):
            callbacks[1](instance_id)


def token_bucket(rate_mbps: int) -> str:
    """Arguments of tc's tbf for one direction of a link.

    The burst holds 5 ms of traffic, and never less than the largest segment that the kernel hands down in one piece.
    """
    burst_bytes = max(256 << 10, rate_mbps * 1_000_000 // 8 // 200)
    return f"rate {rate_mbps}mbit burst {burst_bytes} latency 50ms"


def why_impossible() -> str | None:
    """None where this machine can run the netns level, else the reason."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        probe = subprocess.run([*_UNSHARE, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return "unshare is not installed (package util-linux)"
    except subprocess.TimeoutExpired:
        return "making a network namespace took more than 10 s"
    if probe.returncode == 0:
        return None
    return (probe.stderr.strip().splitlines() or ["network namespaces do not work here"])[-1]


def measured_link_mbps() -> int:
    """A 24th of what one TCP stream over this machine's loopback carries, in Mbit/s; takes half a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_pour, args=(server.getsockname(),), daemon=True)
        sender.start()
        stream, _ = server.accept()
        with stream:
            block = bytearray(1 << 20)
            start, received = time.perf_counter(), 0
            while (seconds := time.perf_counter() - start) < _MEASURE_SECONDS:
                received += stream.recv_into(block)
        sender.join()
    return max(1, round(received * 8 / seconds / 1e6 / _MEASURED_RATIO))


def _pour(address: tuple[str, int]) -> None:
    block = bytes(1 << 20)
    with socket.create_connection(address) as stream, contextlib.suppress(ConnectionError):
        while True:
            stream.sendall(block)


def routes() -> list[str]:
    """Destinations of this machine's IPv4 routes, without the default one."""
    answer = subprocess.run(
        ["ip", "-json", "route", "show", "table", "all"], capture_output=True, text=True, check=True
    )
    return [route["dst"] for route in json.loads(answer.stdout) if route["dst"] != "default" and "." in route["dst"]]


def overlapping(cidr: str, destinations: Iterable[str]) -> bool:
    network = ipaddress.ip_network(cidr)
    return any(network.overlaps(ipaddress.ip_network(destination)) for destination in destinations)


def _claim_block() -> tuple[int, socket.socket]:
    """A block that no route of this machine and no other sandbox uses, and the socket that keeps it claimed."""
    taken = routes()
    for block in _BLOCKS:
        wanted = (f"10.{block}.0.0/16", f"198.18.{block}.0/24", f"198.19.{block}.0/30")
        if any(overlapping(cidr, taken) for cidr in wanted):
            continue
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0micsctl-sandbox-{block}")  # an abstract name: it goes with the process
        except OSError:
            claim.close()
            continue
        return block, claim
    raise UsageError("cannot start the sandbox", "10.77.0.0/16 to 10.156.0.0/16 are all in use on this machine")


def _ip(*commands: str) -> None:
    answer = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(commands), text=True, capture_output=True, check=False
    )
    if answer.returncode != 0:
        raise MicsctlError("cannot set up the sandbox's network", answer.stderr.strip())
