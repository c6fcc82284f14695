"""The sandbox as the command line sees it: start it, look at it, break it, stop it."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from micsctl.aws.settings import AwsSettings
from micsctl.errors import MicsctlError, UsageError
from micsctl.home import Home
from micsctl.sandbox import auth, state
from micsctl.sandbox.faults import Fault
from micsctl.sandbox.server import Config
from micsctl.sandbox.state import Leftovers, SandboxFolder
from micsctl.spec import SandboxSpec

LEVEL_VARIABLE = "MICSCTL_SANDBOX_LEVEL"  # in place of `sandbox.level`; also takes "none": no hosts, for tests
DEFAULT_REGION = "us-east-1"
_LINK_MBPS = {"p3dn": 400, "p4d": 800, "none": None}
_READY_SECONDS = 60.0  # about one second on an idle machine
_STOP_SECONDS = 20.0
_ENDING_SECONDS = 5.0  # between a server's last answer and the release of its lock
_POLL_SECONDS = 0.2
_PROGRAMS = {  # program -> the Debian package that has it
    "netns": {
        "sshd": "openssh-server",
        "ssh-keygen": "openssh-client",
        "rsync": "rsync",
        "ip": "iproute2",
        "tc": "iproute2",
        "unshare": "util-linux",
        "nsenter": "util-linux",
    },
    "process": {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "rsync": "rsync"},
    "none": {},
}
_PATH = f"{os.defpath}:/usr/sbin:/usr/local/sbin:/sbin:{os.environ.get('PATH', '')}"


@dataclass(frozen=True)
class SandboxInfo:
    """A running sandbox."""

    level: str  # "netns", "process", "none"
    link_mbps: int | None  # of every node's link; None = not shaped
    shaped: bool
    devices_per_node: int
    device_memory_bytes: int
    shared_folder: Path  # on this machine; the nodes' /fsx (netns) or MICS_SHARED (process)
    interface: str  # of a node's private address, "eth0" or "lo"
    pid: int
    note: str  # why it is not the netns level; "" where it is
    settings: AwsSettings  # for DEFAULT_REGION


def ensure(home: Home, spec: SandboxSpec, ssh_user: str, *, mine: bool = False) -> SandboxInfo:
    """The running sandbox, started where none runs, started anew where it differs from `spec` and has no instances.

    mine  one that is started ends with this process, even where that is killed

    Raises UsageError where a program or a port is missing, or where instances of another kind of sandbox run.
    """
    folder = _folder(home)
    if state.is_owned(folder):
        running = _wait_for_state(folder)
        # links are measured once: the same wish is the same sandbox
        if _wish(_config(running)) == (wish := _wished(home, spec, ssh_user, _config(running))):
            return _info(folder, running)
        if count := _ask(running, "GET", "about")["live_instances"]:
            raise UsageError(
                "the sandbox runs with other settings",
                f"{count} instances are alive in it; it runs with {_wish(_config(running))}, asked for is {wish}",
                next="micsctl down, or micsctl sandbox stop",
            )
        stop(home)
    return _start(home, folder, spec, ssh_user, mine)


def status(home: Home) -> SandboxInfo | None:
    """None where no sandbox runs."""
    folder = _folder(home)
    return _info(folder, _wait_for_state(folder)) if state.is_owned(folder) else None


def stop(home: Home) -> Leftovers:
    """End the sandbox and sweep; what was left in the emulator before, and what is left on this machine after."""
    folder = _folder(home)
    resources: tuple[str, ...] = ()
    if state.is_owned(folder):
        running = _wait_for_state(folder)
        resources = _resources(folder, running)
        _end(folder, int(running["pid"]), int(running["start_ticks"]))
    if folder.path.exists() and (lock := state.acquire(folder)) is not None:
        state.sweep(folder)
        state.remove(folder.path)
        os.close(lock)
    return state.leftovers(folder, resources)


def leftovers(home: Home) -> Leftovers:
    """Everything of the sandbox that exists right now, a running server included."""
    folder = _folder(home)
    running = state.read_state(folder) if state.is_owned(folder) else None
    return state.leftovers(folder, _resources(folder, running) if running else ())


def inject(home: Home, *added: Fault) -> None:
    """Add faults to the running sandbox."""
    running = _running(home)
    for fault in added:
        _ask(running, "POST", "faults", fault.as_json())


def faults(home: Home) -> list[Fault]:
    """Those in force, with what is left of `times` and `skip`."""
    return [Fault.from_json(one) for one in _ask(_running(home), "GET", "faults")]


def clear_faults(home: Home) -> None:
    _ask(_running(home), "DELETE", "faults")


def choose_level(spec: SandboxSpec) -> tuple[str, str]:
    """The level to run at, and why it is not netns ("" where it is).

    `auto` takes the process level where namespaces are not to be had: for an ordinary user, and for root in a container
    (process.py drops root's capabilities, and refuses root on a machine that systemd runs). Raises UsageError where the
    netns level was asked for and cannot be had.
    """
    from micsctl.sandbox.netns import why_impossible

    wanted = os.environ.get(LEVEL_VARIABLE) or spec.level
    if wanted in ("process", "none"):
        return wanted, f"{wanted} was asked for"
    _require_programs("netns" if wanted == "netns" or os.geteuid() == 0 else "process")
    reason = why_impossible()
    if not reason:
        return "netns", ""
    if wanted == "netns":
        hint = "run it with sudo, or set sandbox.level: auto"
        raise UsageError("the netns level of the sandbox is not possible here", reason, next=hint)
    return "process", reason


def _start(home: Home, folder: SandboxFolder, spec: SandboxSpec, ssh_user: str, mine: bool) -> SandboxInfo:
    level, note = choose_level(spec)
    _require_programs(level)
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise UsageError("the sandbox is not installed", "it needs moto", next="pip install 'micsctl[sandbox]'")
    if level == "netns":
        _require_readable_python()
    config = replace(_resolve(home, spec, ssh_user, level, note), owner_pid=os.getpid() if mine else None)
    home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its OSError names the folder that cannot be used
    # cwd "/": the server must not keep anybody's folder busy, and must not import from it
    command = [sys.executable, "-m", "micsctl.sandbox.server", str(folder.path), json.dumps(asdict(config))]
    environment = {**_without_aws(os.environ), state.MARK: folder.id}
    starter = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        start_new_session=True,  # Ctrl-C is for the command, which then decides
    )
    answer = _first_line(starter)
    if answer.get("error"):
        error = answer["error"]
        kind = UsageError if error.get("usage") else MicsctlError
        raise kind(error["what"], error["why"], next=error["next"])
    # another command may have been faster, with the same wish or another
    return _info(folder, _wait_for_state(folder)) if answer.get("ready") else ensure(home, spec, ssh_user, mine=mine)


def _without_aws(environment: Mapping[str, str]) -> dict[str, str]:
    """moto asks boto3 for the regions, which fails over a profile that is not there or a broken ~/.aws/config."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("AWS_", "MOTO_"))}
    return {**kept, "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


def _first_line(starter: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the server says about its start."""
    assert starter.stdout is not None
    assert starter.stderr is not None
    with starter.stdout, starter.stderr:
        deadline = time.monotonic() + _READY_SECONDS
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([starter.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise MicsctlError("the sandbox did not start", f"no answer within {_READY_SECONDS:.0f} s")
            piece = os.read(starter.stdout.fileno(), 1 << 16)
            if not piece:
                break
            line += piece
        starter.wait()
        if not line:
            why = starter.stderr.read().decode(errors="replace").strip()
            raise MicsctlError("the sandbox did not start", why[-1000:] or "its process ended without a word")
    answer = json.loads(line)
    assert isinstance(answer, dict)
    return answer


def _resolve(home: Home, spec: SandboxSpec, ssh_user: str, level: str, note: str) -> Config:
    from micsctl.sandbox.netns import measured_link_mbps

    link_mbps: int | None = spec.link_mbps
    if link_mbps is None and level == "netns":
        link_mbps = measured_link_mbps() if spec.links == "measured" else _LINK_MBPS[spec.links]
    return Config(
        level=level,
        link_mbps=link_mbps if level == "netns" else None,
        links=str(spec.link_mbps or spec.links),
        devices_per_node=spec.devices_per_node,
        device_memory_bytes=int(spec.device_memory),
        ssh_user=ssh_user,
        hidden=(str(home.folder / "clusters"),),
        note=note,
    )


def _wish(config: Config) -> dict[str, Any]:
    """What makes two sandboxes the same."""
    shown = ("level", "links", "devices_per_node", "device_memory_bytes", "ssh_user")
    return {name: value for name, value in asdict(config).items() if name in shown}


def _wished(home: Home, spec: SandboxSpec, ssh_user: str, running: Config) -> dict[str, Any]:
    asked = os.environ.get(LEVEL_VARIABLE) or spec.level
    level = running.level if asked == "auto" else asked  # auto takes what runs
    fixed = spec if spec.link_mbps or spec.links != "measured" else spec.model_copy(update={"link_mbps": 1})
    wish = _wish(_resolve(home, fixed, ssh_user, level, ""))
    return {**wish, "links": str(spec.link_mbps or spec.links)}


def _require_programs(level: str) -> None:
    missing = {name: package for name, package in _PROGRAMS[level].items() if not shutil.which(name, path=_PATH)}
    if missing:
        raise UsageError(
            "the sandbox cannot run here",
            "missing: " + ", ".join(f"{name} (package {package})" for name, package in missing.items()),
            next=f"sudo apt-get install {' '.join(sorted(set(missing.values())))}",
        )


def _require_readable_python() -> None:
    """The nodes' login user runs this very interpreter; the folders above it are opened for him, the files are not."""
    package = importlib.util.find_spec("torch") or importlib.util.find_spec("moto")
    for path in (os.path.realpath(sys.executable), package.origin if package else None):
        if path and not os.stat(path).st_mode & 0o004:
            folder = sys.prefix if path.startswith(sys.prefix) else sys.base_prefix
            raise UsageError(
                "the sandbox's nodes cannot use this Python",
                f"only its owner may read {path}, and the nodes' login user is another one",
                next=f"chmod -R o+rX {folder}",
            )


def _folder(home: Home) -> SandboxFolder:
    """Raises UsageError where it is another user's: he could change what its server runs."""
    folder = SandboxFolder(home.sandbox)
    try:
        owner = folder.path.stat().st_uid
    except FileNotFoundError:
        return folder
    except PermissionError:
        owner = None
    if owner != os.geteuid():
        whose = "cannot be entered" if owner is None else f"belongs to user id {owner}"
        what, instead = "the sandbox's folder is not yours", "set MICSCTL_HOME to a folder of your own"
        raise UsageError(what, f"{folder.path} {whose}", next=instead)
    return folder


def _wait_for_state(folder: SandboxFolder) -> dict[str, Any]:
    """What the owner of the folder says about itself; it may be just starting."""
    deadline = time.monotonic() + _READY_SECONDS
    while (found := state.read_state(folder)) is None:
        if time.monotonic() > deadline or not state.is_owned(folder):
            raise MicsctlError("the sandbox is not ready", f"see {folder.log}", next="micsctl sandbox stop")
        time.sleep(0.05)
    return found


def _running(home: Home) -> dict[str, Any]:
    folder = _folder(home)
    if not state.is_owned(folder):
        raise UsageError("no sandbox runs", next="micsctl sandbox start")
    return _wait_for_state(folder)


def _config(running: dict[str, Any]) -> Config:
    raw = running["config"]
    return Config(**{**raw, "hidden": tuple(raw["hidden"])})


def _info(folder: SandboxFolder, running: dict[str, Any]) -> SandboxInfo:
    config = _config(running)
    return SandboxInfo(
        level=config.level,
        link_mbps=config.link_mbps,
        shaped=config.link_mbps is not None,
        devices_per_node=config.devices_per_node,
        device_memory_bytes=config.device_memory_bytes,
        shared_folder=folder.shared,
        interface="lo" if config.level == "process" else "eth0",
        pid=int(running["pid"]),
        note=config.note,
        settings=AwsSettings(
            region=DEFAULT_REGION,
            endpoint_url=running["endpoint_url"],
            access_key=running["key"]["access_key"],
            secret_key=running["key"]["secret_key"],
            poll_seconds=_POLL_SECONDS,
            ssh_user=running["ssh_user"],
            ssh_port=int(running["ssh_port"]),
            caller_cidr=running["caller_cidr"],
            vpc_cidr=running["vpc_cidr"],
        ),
    )


def _resources(folder: SandboxFolder, running: dict[str, Any]) -> tuple[str, ...]:
    """What is left in the emulator; nothing where it ends at this moment; "unknown" where it hangs."""
    try:
        return tuple(_ask(running, "GET", "about")["resources"])
    except MicsctlError as error:
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline:
            if not state.is_owned(folder):
                return ()
            time.sleep(0.02)
        return (f"unknown: {error.what}",)


def _ask(running: dict[str, Any], method: str, path: str, data: Any = None) -> Any:
    """A signed request to one of the server's control paths."""
    where = urlsplit(running["endpoint_url"])
    body = b"" if data is None else json.dumps(data).encode()
    request = auth.Request(method, f"/_sandbox/{path}", "", {"host": where.netloc}, body)
    headers = auth.sign(request, auth.Key(**running["key"]), datetime.now(UTC), service="sandbox")
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    with contextlib.closing(connection):
        try:
            connection.request(method, request.path, body or None, headers)
            response = connection.getresponse()
            answer = json.loads(response.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MicsctlError("the sandbox does not answer", str(error), next="micsctl sandbox stop") from error
    if response.status != http.client.OK:
        raise UsageError("the sandbox refused the request", str(answer))
    return answer


def _end(folder: SandboxFolder, pid: int, start_ticks: int) -> None:
    """SIGTERM, then SIGKILL, to the server, and only to it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        server = state.Process(pid, start_ticks, "")
        if server.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _STOP_SECONDS
        while (server.alive or state.is_owned(folder)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not server.alive and not state.is_owned(folder):
            return
    raise MicsctlError("the sandbox does not end", f"its server is process {pid}", next=f"kill -9 {pid}")
