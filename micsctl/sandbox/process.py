"""Hosts at the process level: an ordinary user's own sshd per node, each on an address of its own in 127.0.0.0/8.

Only loopback is touched. Nothing is isolated: nodes share this machine's process ids, ports, name, /tmp and network,
so links are not shaped and every node reaches every other one. Everything runs with no_new_privs; programs that would
change the machine are shadowed by shims on PATH (shim.sh); the system's D-Bus, by which a desktop user may power the
machine off, is hidden. It guards against accidents of a node's own scripts, not against malice.

Linux lets everyone bind every address of 127.0.0.0/8. On macOS (untested) each needs `ifconfig lo0 alias`.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from micsctl.errors import UsageError
from micsctl.sandbox import userd
from micsctl.sandbox.hosts import HostEnded, HostRequest, HostsSettings

SHIMMED = (
    *("shutdown", "poweroff", "halt", "reboot", "systemctl", "systemd-run", "service", "sudo"),
    *("mount", "umount", "mkfs", "mkfs.ext4", "mkfs.xfs", "mdadm", "apt-get", "apt", "modprobe", "sysctl"),
)
_PACKAGE = Path(__file__).resolve().parent
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SFTP_SERVER_PATH = "/usr/lib/openssh:/usr/libexec/openssh:/usr/lib/ssh:/usr/libexec:/usr/lib/misc"
_OCTETS = range(77, 101)  # 127.<octet>.0.0/16 is the VPC, 127.<octet + 100>.0.0/16 are its public addresses
_CLAIM = "255.254"  # whoever holds this address of the public range owns both ranges
_END_SECONDS = 15.0


@dataclass(frozen=True)
class _Running:
    instance_id: str
    folder: Path
    private_ip: str
    lifeline: socket.socket
    userd: subprocess.Popen[bytes]
    follower: threading.Thread


@dataclass(frozen=True)
class _Programs:
    sshd: str
    sftp_server: str


class ProcessHosts:
    """NodeHosts for any user. Nodes live in `settings.folder/nodes/<instance id>`.

    `python` is the interpreter that has torch (nodes see it as MICSCTL_PYTHON). Elastic IPs come from `public_cidr`: on
    `route`, one more sshd of the node listens there.

    Raises UsageError where OpenSSH is missing, `ssh_port` is taken, or the account cannot be logged in to. Root is
    accepted (in containers there is often nobody else), with all capabilities but three dropped, unless systemd runs
    this machine: systemd would shut it down for any process with user id 0.
    """

    level = "process"
    caller_cidr = "127.0.0.1/32"

    def __init__(self, settings: HostsSettings, *, ssh_port: int = 2222, python: str = sys.executable) -> None:
        account = _account()
        self._programs = _find_programs()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where an sshd of root puts its half without rights
        self._claim, octet = _claim_range(ssh_port)
        self.ssh_user: str | None = account
        self.ssh_port = ssh_port
        self.vpc_cidr = f"127.{octet}.0.0/16"
        self.public_cidr = f"127.{octet + 100}.0.0/24"
        self._folder = settings.folder.resolve()
        self._shims = _write_shims(self._folder)
        self._metadata_url = settings.metadata_url
        self._environment = {
            "MICSCTL_SANDBOX": settings.sandbox_id,
            "MICS_SHARED": str(settings.shared_folder),
            "MICSCTL_PYTHON": python,
            "USER": account,
            "LOGNAME": account,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PATH": _node_path(self._shims),
            "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent",
            "AWS_ENDPOINT_URL_S3": settings.s3_url,
        }
        self._lock = threading.Lock()
        self._nodes = dict[str, _Running]()
        self._routes = dict[str, str]()

    def start(self, requests: Sequence[HostRequest], on_running: Callable[[str], None], on_ended: HostEnded) -> None:
        for request in requests:
            node = self._boot(request, on_running, on_ended)
            with self._lock:
                self._nodes[node.instance_id] = node
            node.follower.start()

    def stop(self, instance_ids: Sequence[str]) -> None:
        with self._lock:
            for node in [self._nodes[i] for i in instance_ids if i in self._nodes]:
                # not close(): the follower still reads from it until userd is gone
                node.lifeline.shutdown(socket.SHUT_WR)

    def console(self, instance_id: str) -> str:
        log = self._node_folder(instance_id) / "console.log"
        return log.read_text(errors="replace").replace("\n", "\r\n") if log.is_file() else ""

    def ssh_ready(self, instance_id: str) -> bool:
        with self._lock:
            node = self._nodes.get(instance_id)
        return node is not None and _answers_ssh(node.private_ip, self.ssh_port)

    def route(self, public_ip: str, instance_id: str | None) -> None:
        with self._lock:
            before = self._nodes.get(self._routes.pop(public_ip, ""))
            after = self._nodes.get(instance_id or "")
            if after and instance_id:
                self._routes[public_ip] = instance_id
            if before:
                _tell(before, {"unlisten": public_ip})
            if after:
                _tell(after, {"listen": public_ip})

    def close(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
        self.stop([node.instance_id for node in nodes])
        for node in nodes:
            node.follower.join(2 * _END_SECONDS)
        userd.kill_all(str(self._folder))
        self._claim.close()

    def _node_folder(self, instance_id: str) -> Path:
        return self._folder / "nodes" / instance_id

    def _boot(self, request: HostRequest, on_running: Callable[[str], None], on_ended: HostEnded) -> _Running:
        folder = self._node_folder(request.instance_id)
        environment = {
            **self._environment,
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "MICS_NODE": request.instance_id,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self._metadata_url}/{request.instance_id}",
            "AWS_DEFAULT_REGION": request.region,
            userd.FOLDER_VARIABLE: str(folder),
        }
        _write_node(folder, request, _sshd_config(folder, self._programs, environment), self._shims)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", str(_PACKAGE / "userd.py"), str(theirs.fileno()), str(folder)]
        with theirs, (folder / "userd.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, request.private_ip, str(self.ssh_port), self._programs.sshd],
                cwd=folder / "home",
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the server's terminal is the server's business
            )
        follower = threading.Thread(target=self._follow, args=(request.instance_id, on_running, on_ended), daemon=True)
        return _Running(request.instance_id, folder, request.private_ip, ours, process, follower)

    def _follow(self, instance_id: str, on_running: Callable[[str], None], on_ended: HostEnded) -> None:
        """From boot to end of one node. Its one event is `running`; then comes the end of the stream."""
        with self._lock:
            node = self._nodes[instance_id]
        with node.lifeline, node.lifeline.makefile() as events:
            try:
                for _ in events:
                    on_running(instance_id)
            except ConnectionResetError:
                pass  # userd was killed with unread messages: it has ended, which is what comes next
            try:
                node.userd.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                node.userd.kill()
                node.userd.wait()
            userd.kill_all(str(node.folder))  # finds something only where userd was itself killed
            with self._lock:
                del self._nodes[instance_id]
                self._routes = {ip: owner for ip, owner in self._routes.items() if owner != instance_id}
        # EC2 shows the console of a terminated instance for a while; its disk is gone
        for disk in ("home", "tmp"):
            shutil.rmtree(node.folder / disk, ignore_errors=True)
        on_ended(instance_id)


def _tell(node: _Running, message: Mapping[str, str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it is just ending, which unlistens too
        node.lifeline.sendall(json.dumps(message).encode() + b"\n")


def _answers_ssh(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=0.5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _write_node(folder: Path, request: HostRequest, sshd_config: str, shims: Path) -> None:
    for name in ("home", "tmp"):
        (folder / name).mkdir(mode=0o700, parents=True)
    (folder / "authorized_keys").write_text(request.public_key.strip() + "\n")
    (folder / "sshd_config").write_text(sshd_config)
    # /etc/profile, read by login shells only, sets PATH anew
    (folder / "home" / ".profile").write_text(f'PATH={shlex.quote(str(shims))}:"$PATH"\n')
    if user_data := _unpacked(request.user_data):
        (folder / "user-data").write_bytes(user_data)
        (folder / "user-data").chmod(0o700)


def _unpacked(user_data: bytes) -> bytes:
    """As cloud-init does it: gzip is unpacked, and what cannot be stays as it is, which is no script."""
    if user_data.startswith(b"\x1f\x8b"):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            return gzip.decompress(user_data)
    return user_data


def _sshd_config(folder: Path, programs: _Programs, environment: Mapping[str, str]) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    options = {
        "AuthorizedKeysFile": quoted(f"{folder}/authorized_keys".replace("%", "%%")),
        "AuthenticationMethods": "publickey",
        "PermitRootLogin": "prohibit-password",
        "PermitUserRC": "no",  # ~/.ssh/rc of the real account
        "StrictModes": "no",  # the folder's parents may be anyone's
        "UsePAM": "no",
        "UseDNS": "no",
        "PidFile": "none",
        "PrintMotd": "no",
        "PrintLastLog": "no",
        "MaxStartups": "100",
        "Subsystem": f"sftp {programs.sftp_server}",
        "ForceCommand": f"sh {shlex.quote(str(_PACKAGE / 'login.sh'))}",
        # all in one line: of several, sshd takes the first only
        "SetEnv": " ".join(quoted(f"{name}={value}") for name, value in environment.items()),
    }
    keys = [f"HostKey {quoted(f'{folder}/ssh_host_{kind}_key')}" for kind in ("ed25519", "ecdsa")]
    return "\n".join([*keys, *(f"{name} {value}" for name, value in options.items())]) + "\n"


def _write_shims(hosts: Path) -> Path:
    folder = hosts / "shims"
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHIMMED:
        shutil.copyfile(_PACKAGE / "shim.sh", folder / name)
        (folder / name).chmod(0o755)
    return folder


def _node_path(shims: Path) -> str:
    """The shims, the system's programs, then what else this process finds (a rsync that is not the system's)."""
    ours = [folder for folder in os.environ.get("PATH", "").split(":") if folder.startswith("/")]
    return ":".join(dict.fromkeys([str(shims), *_SYSTEM_PATH.split(":"), *ours]))


def _find_programs() -> _Programs:
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    sshd, sftp_server = shutil.which("sshd", path=path), shutil.which("sftp-server", path=_SFTP_SERVER_PATH)
    missing = [name for name in ("ssh-keygen", "bash", "rsync") if not shutil.which(name, path=path)]
    if not sshd or not sftp_server or missing:
        names = [*([] if sshd else ["sshd"]), *([] if sftp_server else ["sftp-server"]), *missing]
        raise UsageError(
            "cannot start the sandbox's hosts",
            f"not installed: {', '.join(names)}",
            next="apt-get install openssh-server rsync    (the system's own sshd need not run)",
        )
    # sshd starts itself anew for every connection and insists on an absolute path
    return _Programs(str(Path(sshd).absolute()), sftp_server)


def _account() -> str:
    """Name of the account that runs this, where sshd can log in to it."""
    what, instead = "cannot start the sandbox's hosts at the process level", "run it as an ordinary user"
    if os.geteuid() == 0 and Path("/run/systemd/system").is_dir():
        why = "a process of root could shut this machine down through systemd, even without capabilities"
        raise UsageError(what, why, next=f"{instead}, or set sandbox.level: netns")
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError:
        raise UsageError(what, f"user id {os.geteuid()} has no account", next=instead) from None
    shell = account.pw_shell or "/bin/sh"
    if os.path.basename(shell) in ("nologin", "false") or not os.access(shell, os.X_OK):
        why = f"sshd starts the login shell of {account.pw_name}, which is {shell}"
        raise UsageError(what, why, next=instead)
    return account.pw_name


def _claim_range(port: int) -> tuple[socket.socket, int]:
    """A bound socket that keeps other sandboxes away, and the octet that it stands for. UsageError if none is free."""
    used = [address for address, _, _ in _listeners(port)]
    for octet in _OCTETS:
        if any(address.startswith((f"127.{octet}.", f"127.{octet + 100}.")) for address in used):
            continue
        claim = socket.socket()
        try:
            # without SO_REUSEADDR and without listening: nobody else can bind it, nobody can connect to it
            claim.bind((f"127.{octet + 100}.{_CLAIM}", port))
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(
                f"cannot bind port {port} of 127.{octet + 100}.{_CLAIM}",
                f"{error.strerror}. Linux lets everyone bind every 127.x.y.z above port 1023; macOS needs an alias",
                next=f"sudo ifconfig lo0 alias 127.{octet + 100}.{_CLAIM}" if sys.platform == "darwin" else "",
            ) from None
        return claim, octet
    raise UsageError(
        f"port {port} is in use",
        f"by {_holder(port)}; the sandbox's hosts need it on their addresses 127.77.x.y to 127.100.x.y",
        next="end that program, then the same command again",
    )


def _listeners(port: int) -> list[tuple[str, int, str]]:
    """Address (IPv6 only where it is the wildcard), user id and inode of every TCP socket that listens on `port`."""
    found = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else ():
            _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
            address, _, number = local.rpartition(":")
            if state == "0A" and int(number, 16) == port and (len(address) == 8 or not address.strip("0")):
                octets = bytes.fromhex(address[:8])
                ordered = octets[::-1] if sys.byteorder == "little" else octets
                found.append((socket.inet_ntoa(ordered), int(uid), inode))
    return found


def _holder(port: int) -> str:
    """Who listens on `port` on every address, as far as this user may see it."""
    for address, uid, inode in _listeners(port):
        if address == "0.0.0.0":
            for link in Path("/proc").glob("[0-9]*/fd/*"):
                with contextlib.suppress(OSError):  # another user's, or gone
                    if os.readlink(link) == f"socket:[{inode}]":
                        pid = link.parts[2]
                        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
                        return f"process {pid} ({command})"
            with contextlib.suppress(KeyError):
                return f"a process of user {pwd.getpwuid(uid).pw_name}"
            return f"a process of user id {uid}"
    return "other sandboxes"
