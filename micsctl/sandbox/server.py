"""The sandbox's own process: `python -m micsctl.sandbox.server FOLDER CONFIG`.

Says one line of JSON on standard output, `{"ready": true}` or the error, then leaves the terminal. Holds the folder's
lock for life.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import string
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from micsctl.errors import MicsctlError, UsageError
from micsctl.sandbox import state
from micsctl.sandbox.application import Application
from micsctl.sandbox.auth import Key
from micsctl.sandbox.faults import FaultBook
from micsctl.sandbox.hosts import HostsSettings, NodeHosts
from micsctl.sandbox.roles import RoleKeys
from micsctl.sandbox.state import SandboxFolder


@dataclass(frozen=True)
class Config:
    """What a server is started with. `link_mbps` is already resolved; None = not shaped."""

    level: str  # "netns", "process", "none"
    link_mbps: int | None
    links: str  # as the user asked, to see whether he now asks for something else
    devices_per_node: int
    device_memory_bytes: int
    ssh_user: str
    hidden: tuple[str, ...]  # paths that no node shall see
    note: str  # why not the netns level, "" where it is
    owner_pid: int | None = None  # the sandbox ends with this process; None = when somebody ends it


def _new_key() -> Key:
    letters = string.ascii_uppercase + string.digits
    return Key("AKIA" + "".join(secrets.choice(letters) for _ in range(16)), secrets.token_urlsafe(30))


@dataclass(frozen=True)
class _Started:
    """The hosts, and at netns level where their requests arrive and what tells that they all ended."""

    hosts: NodeHosts
    metadata_socket: socket.socket | None = None
    s3_socket: socket.socket | None = None
    ended: threading.Event | None = None


def _start_hosts(config: Config, folder: SandboxFolder, metadata_url: str, s3_url: str) -> _Started:
    settings = HostsSettings(
        sandbox_id=folder.id,
        folder=folder.hosts,
        shared_folder=folder.shared,
        ssh_user=config.ssh_user,
        link_mbps=config.link_mbps,
        metadata_url=metadata_url,
        s3_url=s3_url,
    )
    match config.level:
        case "netns":
            from micsctl.sandbox.netns import NetnsHosts

            hosts = NetnsHosts(settings, folder.interface, [*map(Path, config.hidden), folder.path])
            return _Started(hosts, hosts.metadata_socket, hosts.s3_socket, hosts.ended)
        case "process":
            from micsctl.sandbox.process import ProcessHosts

            return _Started(ProcessHosts(settings))
        case _:
            from micsctl.sandbox.fake import FakeHosts

            return _Started(FakeHosts())


def serve(folder: SandboxFolder, config: Config, ready: Callable[[], None]) -> None:
    """Until SIGTERM. `ready` is called when the state file is written and requests are answered."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    from micsctl.sandbox.ec2.install import install
    from micsctl.sandbox.imds import MetadataService
    from micsctl.sandbox.s3 import install as install_s3

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    class KeepAlive(Quiet):
        protocol_version = "HTTP/1.1"

    for path in (folder.hosts, folder.shared, folder.objects):
        path.mkdir(mode=0o700)
    folder.shared.chmod(0o1777)  # as FSx: everybody's; the way to it, the sandbox's folder, is closed
    secret = secrets.token_urlsafe(16) if config.level == "process" else ""
    roles = RoleKeys()
    metadata = MetadataService(lambda address, instance_id: emulator.facts(address, instance_id), roles, secret)
    loopback_metadata = None
    if config.level == "process":
        loopback_metadata = make_server("127.0.0.1", 0, metadata, threaded=True, request_handler=Quiet)
    metadata_url = f"http://127.0.0.1:{loopback_metadata.port}/{secret}" if loopback_metadata else ""
    server = make_server(
        "127.0.0.1", 0, lambda *request: application(*request), threaded=True, request_handler=KeepAlive
    )
    endpoint_url = f"http://127.0.0.1:{server.port}"
    started = _start_hosts(config, folder, metadata_url, endpoint_url)
    hosts = started.hosts
    try:
        faults, key = FaultBook(), _new_key()
        emulator, inner = install(hosts, faults)
        application = Application(
            key,
            roles,
            faults,
            inner,
            install_s3(folder.objects),
            emulator.lock,
            lambda: {"resources": emulator.resources(), "live_instances": emulator.live_instances()},
        )
        servers = [server, *([loopback_metadata] if loopback_metadata else [])]
        for listener, app, handler in (
            (started.metadata_socket, metadata, Quiet),
            (started.s3_socket, application, KeepAlive),
        ):
            if listener:
                address, fd = listener.getsockname()[0], listener.fileno()
                servers.append(make_server(address, 80, app, threaded=True, request_handler=handler, fd=fd))
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        for one in servers:
            threading.Thread(target=one.serve_forever, daemon=True).start()
        state.write_state(
            folder,
            {
                "pid": os.getpid(),
                "start_ticks": state.process(os.getpid()).start_ticks,
                "endpoint_url": endpoint_url,
                "key": asdict(key),
                "config": asdict(config),
                "ssh_user": hosts.ssh_user or config.ssh_user,
                "ssh_port": hosts.ssh_port,
                "vpc_cidr": hosts.vpc_cidr,
                "caller_cidr": hosts.caller_cidr,
            },
        )
        owner = state.process(config.owner_pid) if config.owner_pid else None
        ready()
        while not stop.wait(0.2):
            if owner and not owner.alive:
                break  # killed, or it would have ended the sandbox itself
            emulator.end_interrupted(time.time())
            if started.ended and started.ended.is_set():
                break  # somebody killed the process that holds all nodes: nothing is left to serve
            if not folder.lock.exists():
                break  # somebody removed the folder: nobody could find this server to stop it
    finally:
        hosts.close()


def _leave_terminal(folder: SandboxFolder) -> None:
    """Standard output and error go to the log from now on."""
    log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> int:
    folder, config = SandboxFolder(Path(sys.argv[1])), Config(**json.loads(sys.argv[2]))
    if os.fork():  # the starter waits for this one; the server itself is nobody's child
        os._exit(0)
    os.setsid()
    starter = os.fdopen(os.dup(1), "w")

    def say(message: dict[str, Any]) -> None:
        if not starter.closed:
            with contextlib.suppress(BrokenPipeError), starter:
                starter.write(json.dumps(message) + "\n")

    def ready() -> None:
        """Raises BrokenPipeError where the command that wanted the sandbox has ended: then nobody would stop it."""
        with starter:
            starter.write(json.dumps({"ready": True}) + "\n")

    try:
        lock = state.acquire(folder)
    except OSError as error:
        say({"error": {"what": "the sandbox did not start", "why": str(error), "next": ""}})
        return 1
    if lock is None:
        say({"owned": True})
        return 0
    state.sweep(folder)  # of a server that was killed
    _leave_terminal(folder)
    try:
        serve(folder, config, ready)
    except BrokenPipeError:
        sys.stderr.write("the command that started this sandbox has ended; so does the sandbox\n")
    except UsageError as error:
        say({"error": {"what": error.what, "why": error.why, "next": error.next, "usage": True}})
    except MicsctlError as error:
        why = f"{error.why}\n{_tail(folder)}".strip()
        say({"error": {"what": error.what, "why": why, "next": error.next}})
    except OSError as error:  # of a full disk, for one, where the log cannot be written either
        say({"error": {"what": "the sandbox did not start", "why": str(error), "next": ""}})
        raise
    except Exception as error:
        traceback.print_exc()
        say({"error": {"what": "the sandbox did not start", "why": f"{error}\n{_tail(folder)}".strip(), "next": ""}})
        raise
    finally:
        state.remove(folder.path)
    return 0


def _tail(folder: SandboxFolder) -> str:
    return "\n".join(folder.log.read_text(errors="replace").splitlines()[-5:])


if __name__ == "__main__":
    sys.exit(main())
