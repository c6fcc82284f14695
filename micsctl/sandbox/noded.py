"""Pid 1 of the sandbox's own network, mount and pid namespaces: starts nodes, links them, reaps them.

Run by netns.py as `python -m micsctl.sandbox.noded FD JSON`. Speaks JSON lines over the socket FD. When the other end
closes, however it dies, this process ends, and the kernel ends everything below it: no node, interface or mount has a
name that somebody would have to clean up.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from micsctl.sandbox import image

METADATA_ADDRESS = "169.254.169.254"
S3_ADDRESS = "198.19.255.80"  # RFC 2544: never routed; not a block that netns.py gives to a sandbox
BRIDGE, UPLINK, LAPTOP_TABLE = "br0", "up0", "100"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child=SIGKILL")
_PR_SET_PDEATHSIG = 1
_PROBE_SECONDS = 0.03
_SAFE_UPPER = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "zfs"}


@dataclass
class Node:
    """One running node. `process` is the unshare(1) that started it; killing it kills the node."""

    instance_id: str
    private_ip: str
    process: subprocess.Popen[bytes]
    linked: bool = False
    ready: bool = False
    addresses: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Settings:
    folder: Path  # nodes live in folder/nodes, consoles in folder/consoles
    shared: Path
    user: str
    sandbox_id: str
    tbf: str  # arguments of tc's token bucket filter, "" = links are not shaped
    hidden: tuple[str, ...]


class Noded:
    def __init__(self, control: socket.socket, settings: Settings) -> None:
        self._control = control
        self._settings = settings
        self._nodes = dict[str, Node]()
        self._gateways = set[str]()
        self._elastic = dict[str, str]()  # public address -> instance id
        self._links = 0
        self._probes = dict[int, tuple[Node, socket.socket]]()
        self._next_probe = 0.0

    def prepare(self) -> None:
        """Network, the image's layer, folders; then says hello with the sockets of IMDS and S3."""
        _ip(
            "link set lo up",
            f"link add name {BRIDGE} type bridge",
            f"link set {BRIDGE} mtu 9001 up",
            f"addr add {METADATA_ADDRESS}/32 dev {BRIDGE}",
            f"addr add {S3_ADDRESS}/32 dev {BRIDGE}",
        )
        for name in ("ip_forward", "conf/all/rp_filter", "conf/default/rp_filter", f"conf/{BRIDGE}/rp_filter"):
            Path("/proc/sys/net/ipv4", name).write_text("1" if name == "ip_forward" else "0")
        self._nodes_folder.mkdir()
        (self._settings.folder / "consoles").mkdir()
        if filesystem_of(self._settings.folder) not in _SAFE_UPPER:  # a container's overlay cannot be an upper layer
            _run("mount", "-t", "tmpfs", "-o", "mode=700", "nodes", str(self._nodes_folder))
        self._layer.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "mode=755,size=64m", "layer", str(self._layer))
        (self._layer / "tree").mkdir()
        hidden = image.secrets_of(image.home_folders(), map(Path, self._settings.hidden))
        self._image = image.build(self._layer / "tree", self._settings.user, self._settings.sandbox_id, hidden)
        self._hosts_file.write_text("127.0.0.1 localhost\n")
        sockets = [socket.create_server((address, 80), backlog=64) for address in (METADATA_ADDRESS, S3_ADDRESS)]
        hello = json.dumps({"event": "hello"}).encode() + b"\n"
        socket.send_fds(self._control, [hello], [one.fileno() for one in sockets])
        for one in sockets:
            one.close()

    def serve(self) -> None:
        """Until the other end closes."""
        wake, waker = os.pipe()
        for end in (wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        buffer = b""
        while True:
            timeout = _PROBE_SECONDS if self._unready() or self._probes else None
            probing = [probe.fileno() for _, probe in self._probes.values()]
            readable, writable, _ = select.select([self._control.fileno(), wake], probing, [], timeout)
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self._reap()
            self._probe(writable)
            if self._control.fileno() in readable:
                data = self._control.recv(1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "uplink":
                self._uplink(message["laptop"], message["router"])
            case "start":
                started = [self._start(request) for request in message["nodes"]]
                for node, request, reader, writer in started:
                    self._link(node, request, reader, writer)
            case "stop":
                for instance_id in message["ids"]:
                    if instance_id in self._nodes:
                        self._nodes[instance_id].process.kill()
            case "route":
                self._route(message["public_ip"], message["instance_id"])

    def _uplink(self, laptop: str, router: str) -> None:
        """The laptop's end of the wire has been moved in. From there only Elastic IPs lead anywhere."""
        Path(f"/proc/sys/net/ipv4/conf/{UPLINK}/rp_filter").write_text("0")
        _ip(
            f"addr add {router} peer {laptop} dev {UPLINK}",
            f"link set {UPLINK} up",
            f"rule add iif {UPLINK} lookup {LAPTOP_TABLE}",
            f"route add unreachable default table {LAPTOP_TABLE}",
        )
        self._send(event="uplinked")

    def _start(self, request: Mapping[str, Any]) -> tuple[Node, Mapping[str, Any], int, int]:
        folder = self._nodes_folder / request["instance_id"]
        for name in ("upper", "work", "root", "home"):
            (folder / name).mkdir(parents=True)
        (folder / "authorized_keys").write_text(request["public_key"].strip() + "\n")
        (folder / "user-data").write_bytes(bytes.fromhex(request["user_data"]))
        (folder / "binds").write_text("".join(f"{source}\t{target}\n" for source, target in self._image.binds))
        subnet = ipaddress.ip_network(request["subnet_cidr"])
        gateway = str(subnet[1])
        if gateway not in self._gateways:
            self._gateways.add(gateway)
            _ip(f"addr add {gateway}/{subnet.prefixlen} dev {BRIDGE}")
        with self._hosts_file.open("a") as hosts:
            hosts.write(f"{request['private_ip']} {request['hostname']}.ec2.internal {request['hostname']}\n")
        environment = {
            "PATH": _PATH,
            "MICSCTL_SANDBOX": self._settings.sandbox_id,
            "NODE": str(folder),
            "NODE_NAME": request["hostname"],
            "NODE_IP": request["private_ip"],
            "PREFIX": str(subnet.prefixlen),
            "GATEWAY": gateway,
            "TBF": self._settings.tbf,
            "LAYER": str(self._layer / "tree"),
            "SHARED": str(self._settings.shared),
            "HOSTS_FILE": str(self._hosts_file),
            "AWS_ENDPOINT_URL_S3": f"http://{S3_ADDRESS}",
            "AWS_DEFAULT_REGION": request["region"],
            **image.as_environment(self._image),
        }
        boot = str(Path(__file__).with_name("boot.sh"))
        reader, child_out = os.pipe()
        child_in, writer = os.pipe()
        console = self._settings.folder / "consoles" / request["instance_id"]
        with console.open("wb") as log:
            process = subprocess.Popen(
                [*_UNSHARE, "sh", boot, request["instance_id"]],
                stdin=child_in,
                stdout=child_out,
                stderr=log,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        os.close(child_in)
        os.close(child_out)
        node = Node(request["instance_id"], request["private_ip"], process)
        self._nodes[node.instance_id] = node
        return node, request, reader, writer

    def _link(self, node: Node, request: Mapping[str, Any], reader: int, writer: int) -> None:
        """Wait until the node's namespaces exist, plug its wire in, let it go on."""
        try:
            if os.read(reader, 2) != b"r\n":
                return  # it died; the reaper tells
            self._links += 1
            wire = f"v{self._links}"
            _ip(
                f"link add {wire} mtu 9001 type veth peer name eth0 mtu 9001 netns {node.process.pid}",
                f"link set {wire} master {BRIDGE} up",
            )
            if self._settings.tbf:
                _run("tc", "qdisc", "add", "dev", wire, "root", "tbf", *self._settings.tbf.split())
            node.linked = True
            os.write(writer, b"go\n")
        except (OSError, subprocess.CalledProcessError) as error:
            self._send(event="log", text=f"{node.instance_id}: {error}")
            node.process.kill()
        finally:
            os.close(reader)
            os.close(writer)
        if node.linked:
            for public_ip, owner in self._elastic.items():
                if owner == node.instance_id:
                    self._give(public_ip, node)
            self._send(event="running", id=node.instance_id)

    def _route(self, public_ip: str, instance_id: str | None) -> None:
        owner = self._nodes.get(self._elastic.pop(public_ip, ""))
        if owner and public_ip in owner.addresses:
            owner.addresses.discard(public_ip)
            _ip(f"route del {public_ip}/32 table {LAPTOP_TABLE}", f"route del {public_ip}/32", check=False)
            _inside(owner, f"addr del {public_ip}/32 dev lo")
        if instance_id:
            self._elastic[public_ip] = instance_id
            if (node := self._nodes.get(instance_id)) and node.linked:
                self._give(public_ip, node)

    def _give(self, public_ip: str, node: Node) -> None:
        """The address stands on the node's loopback; the way there goes over its private one."""
        node.addresses.add(public_ip)
        way = f"{public_ip}/32 via {node.private_ip} dev {BRIDGE} onlink"
        _ip(f"route replace {way} table {LAPTOP_TABLE}", f"route replace {way}")
        _inside(node, f"addr add {public_ip}/32 dev lo")

    def _unready(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.linked and not node.ready]

    def _probe(self, answered: list[int]) -> None:
        """Tell which nodes' sshd accept connections."""
        for number in list(self._probes):
            node, probe = self._probes[number]
            if number in answered:
                node.ready = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                del self._probes[number]
                probe.close()
                if node.ready:
                    self._send(event="ready", id=node.instance_id)
        if time.monotonic() < self._next_probe:
            return
        self._next_probe = time.monotonic() + _PROBE_SECONDS
        waiting = {node.instance_id for node, _ in self._probes.values()}
        for node in self._unready():
            if node.instance_id not in waiting:
                probe = socket.socket()
                probe.setblocking(False)
                probe.connect_ex((node.private_ip, 22))
                self._probes[probe.fileno()] = (node, probe)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for node in list(self._nodes.values()):
                if node.process.pid == pid:
                    self._forget(node)

    def _forget(self, node: Node) -> None:
        del self._nodes[node.instance_id]
        for number, (owner, probe) in list(self._probes.items()):
            if owner is node:
                del self._probes[number]
                probe.close()
        for public_ip in [ip for ip, owner in self._elastic.items() if owner == node.instance_id]:
            del self._elastic[public_ip]
            _ip(f"route del {public_ip}/32 table {LAPTOP_TABLE}", f"route del {public_ip}/32", check=False)
        lines = self._hosts_file.read_text().splitlines(keepends=True)
        with self._hosts_file.open("r+") as hosts:  # in place: nodes have this very file mounted
            hosts.write("".join(line for line in lines if line.split()[0] != node.private_ip))
            hosts.truncate()
        # the console stays: EC2 shows it for a while after the end
        threading.Thread(
            target=shutil.rmtree, args=(self._nodes_folder / node.instance_id,), kwargs={"ignore_errors": True}
        ).start()
        self._send(event="ended", id=node.instance_id)

    def _send(self, **message: Any) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    @property
    def _nodes_folder(self) -> Path:
        return self._settings.folder / "nodes"

    @property
    def _layer(self) -> Path:
        return self._settings.folder / "layer"

    @property
    def _hosts_file(self) -> Path:
        return self._layer / image.HOSTS_FILE


def filesystem_of(path: Path, table: str | None = None) -> str:
    """Type of the filesystem that holds `path`, from /proc/self/mountinfo."""
    text = Path("/proc/self/mountinfo").read_text() if table is None else table
    best, kind = "", ""
    for line in text.splitlines():
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = point == "/" or path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= len(best):  # a later mount on the same point hides the earlier
            best, kind = point, fields[fields.index("-") + 1]
    return kind


def _inside(node: Node, command: str) -> None:
    """ip(8) in the node's network namespace; the node may be ending."""
    target = ["nsenter", "-t", str(node.process.pid), "-n", "ip", *command.split()]
    subprocess.run(target, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _ip(*commands: str, check: bool = True) -> None:
    force = [] if check else ["-force"]
    subprocess.run(["ip", *force, "-batch", "-"], input="\n".join(commands), text=True, check=check)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    # this process has one thread when it is forked, so the signal means the death of unshare(1), not of a thread
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    raw = json.loads(sys.argv[2])
    settings = Settings(
        folder=Path(raw["folder"]),
        shared=Path(raw["shared"]),
        user=raw["user"],
        sandbox_id=raw["sandbox_id"],
        tbf=raw["tbf"],
        hidden=tuple(raw["hidden"]),
    )
    noded = Noded(control, settings)
    noded.prepare()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the same as its end
        noded.serve()
    os._exit(0)  # at once: the kernel does the rest


if __name__ == "__main__":
    main()
