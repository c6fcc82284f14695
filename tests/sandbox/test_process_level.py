"""The process level with real sshds, run as an ordinary user even where the tests run as root."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from micsctl.cluster.bootstrap import TORCH_VERSION, render_bootstrap
from micsctl.errors import UsageError
from micsctl.sandbox import process

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("process_driver.py")
PORT = 2299  # not the default, so that a sandbox of the person who runs the tests is no obstacle

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="other loopback addresses need an alias here"),
    pytest.mark.skipif(
        not all(shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") for p in ("sshd", "ssh", "rsync")),
        reason="needs sshd, ssh and rsync",
    ),
]


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.03)
    raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")


@dataclass(frozen=True)
class User:
    """Who runs the hosts, and with which interpreter."""

    uid: int
    python: str

    @property
    def prefix(self) -> list[str]:
        if os.geteuid() == self.uid:
            return []
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]

    @property
    def environment(self) -> dict[str, str]:
        # no sshd on this PATH; and no caches that root could not remove from the checkout
        return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="session")
def user() -> User:
    """This user, or for root the first ordinary account that can run a Python 3.11 and read this checkout."""
    if os.geteuid() != 0:
        return User(os.geteuid(), sys.executable)
    accounts = [a for a in pwd.getpwall() if 1000 <= a.pw_uid < 60000 and a.pw_shell.endswith("sh")]
    check = f"import sys; assert sys.version_info >= (3, 11); sys.path.insert(0, {str(ROOT)!r}); import micsctl.errors"
    for account in accounts:
        for python in (sys.executable, "/usr/bin/python3"):
            someone = User(account.pw_uid, python)
            # through a shell, because setpriv's own exec still passes folders that are closed to the account
            command = [*someone.prefix, "sh", "-c", 'exec "$0" -c "$1"', python, check]
            if subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0:
                return someone
    pytest.skip("root's tests need an ordinary account that can run a Python >= 3.11 and read this checkout")


class Sandbox:
    def __init__(self, base: Path, who: User, port: int = PORT, node_python: str = "/nonexistent/python") -> None:
        base.chmod(0o755)
        self.base, self.who, self.port = base, who, port
        self.folder = base / "sand box"  # the blank is on purpose
        self.shared = self.folder / "shared"
        for made in (self.folder, self.shared):
            made.mkdir()
            os.chown(made, who.uid, -1)
        self.key, self.known_hosts = base / "id", base / "known_hosts"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True, timeout=10)
        self.server = subprocess.Popen(
            [*who.prefix, who.python, str(DRIVER), str(self.folder), str(port), node_python],
            env=who.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.ended = list[str]()
        self.running = list[str]()
        self.hello = self.read()
        self.ips = dict[str, str]()

    def read(self) -> dict[str, Any]:
        """The next answer; events are noted on the way."""
        assert self.server.stdout
        for line in self.server.stdout:
            message: dict[str, Any] = json.loads(line)
            if "running" in message:
                self.running.append(message["running"])
            elif "ended" in message:
                self.ended.append(message["ended"])
            else:
                return message
        raise AssertionError("the server ended")

    def send(self, **message: Any) -> None:
        assert self.server.stdin
        self.server.stdin.write(json.dumps(message) + "\n")
        self.server.stdin.flush()

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(**message)
        return self.read()

    def start(self, *ids: str, user_data: bytes = b"") -> None:
        """Boot, wait for sshd, and take the host keys from the consoles."""
        network = self.hello["vpc"].removesuffix("0.0/16")
        self.ips |= {i: f"{network}16.{len(self.ips) + n}" for n, i in enumerate(ids, 10)}
        nodes = [
            {
                "instance_id": i,
                "private_ip": self.ips[i],
                "hostname": i,
                "public_key": Path(f"{self.key}.pub").read_text(),
                "user_data": base64.b64encode(user_data).decode(),
            }
            for i in ids
        ]
        self.send(op="start", nodes=nodes)
        for i in ids:
            wait_for(lambda i=i: self.ask(op="ready", id=i)["ready"], f"sshd of {i}")
            keys = re.findall(r"(ssh-ed25519|ecdsa-\S+) (AAAA\S+) root@", self.console(i))
            assert len(keys) == 2
            with self.known_hosts.open("a") as known:
                known.writelines(f"[{self.ips[i]}]:{self.port} {kind} {key}\n" for kind, key in keys)

    def console(self, i: str) -> str:
        text: str = self.ask(op="console", id=i)["console"]
        return text

    def ssh_command(self, *options: str) -> list[str]:
        strict = {
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "ConnectTimeout": 5,
        }
        pairs = [word for name, value in strict.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-F", "none", "-i", str(self.key), "-p", str(self.port), *options, *pairs]

    def ssh(self, i: str, command: str, *options: str, address: str = "") -> subprocess.CompletedProcess[str]:
        target = f"{self.hello['user']}@{address or self.ips[i]}"
        return subprocess.run(
            [*self.ssh_command(*options), target, command], capture_output=True, text=True, timeout=20, check=False
        )

    def output(self, i: str, command: str) -> str:
        result = self.ssh(i, command)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def node(self, i: str) -> Path:
        return self.folder / "hosts" / "nodes" / i

    def processes(self, i: str = "") -> list[str]:
        """Of one node or of all: what names its folder, in its environment or its command line."""
        mark, found = str(self.node(i)), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
                if mark.encode() in text and folder.name != str(self.server.pid):
                    found.append(f"{folder.name} {(folder / 'cmdline').read_text()[:200]!r}")
        return found

    def close(self) -> None:
        if self.server.poll() is None:
            assert self.server.stdin
            self.server.stdin.close()
            try:
                self.server.wait(20)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()


Opener = Callable[..., Sandbox]


@pytest.fixture
def open_sandbox(user: User) -> Iterator[Opener]:
    yield from _sandboxes(user)


@pytest.fixture(scope="module")
def open_shared(user: User) -> Iterator[Opener]:
    yield from _sandboxes(user)


def _sandboxes(user: User) -> Iterator[Opener]:
    with contextlib.ExitStack() as stack:

        def open_one(port: int = PORT, who: User = user, node_python: str = "/nonexistent/python") -> Sandbox:
            # not tmp_path: its parents are closed to other users
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="micsctl-", ignore_cleanup_errors=True))
            sandbox = Sandbox(Path(folder), who, port, node_python)
            stack.callback(sandbox.close)
            return sandbox

        yield open_one


USER_DATA = textwrap.dedent("""\
    #!/bin/bash
    echo "in $PWD as $(id -u)"
    touch "$HOME/made"
    for name in systemctl mount mkfs mdadm apt-get modprobe sysctl umount systemd-run reboot; do
        $name --something /dev/x || echo "$name failed"
    done
    sudo systemctl stop anything || echo "sudo failed"
    /bin/mount -t tmpfs none "$TMPDIR" 2>/dev/null && echo "mounted"
    shutdown -c
    """).encode()


@pytest.fixture(scope="module")
def pair(open_shared: Opener) -> Sandbox:
    """Two nodes that nobody ends."""
    sandbox = open_shared()
    sandbox.start("i-1", "i-2", user_data=USER_DATA)
    for i in ("i-1", "i-2"):
        wait_for(lambda i=i: "user data ended with" in sandbox.console(i), f"user data of {i}")
    return sandbox


def test_console_announces_host_keys_in_both_styles_and_running_came_once(pair: Sandbox) -> None:
    for i, prefix in ("i-1", ""), ("i-2", r"<14>\w+ +\d+ [\d:]+ cloud-init: ec2: "):
        line = rf"{prefix}(?:ecdsa-sha2-nistp256|ssh-ed25519) AAAA\S+ root@{i}\r\n"
        block = rf"{prefix}-----BEGIN SSH HOST KEY KEYS-----\r\n{line}{line}{prefix}-----END SSH HOST KEY KEYS-----\r\n"
        assert re.search(rf"(?m)^{block}", pair.console(i))
    assert sorted(pair.running) == ["i-1", "i-2"]


def test_a_host_key_of_another_node_is_refused(pair: Sandbox) -> None:
    known, swapped = pair.known_hosts, pair.base / "swapped"
    swapped.write_text(known.read_text().replace(pair.ips["i-2"], "x").replace(pair.ips["i-1"], pair.ips["i-2"]))
    result = pair.ssh("i-2", "true", "-o", f"UserKnownHostsFile={swapped}")
    assert result.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in result.stderr
    assert pair.ssh("i-2", "true", "-o", "UserKnownHostsFile=/dev/null").returncode == 255


def test_sessions_live_in_the_nodes_own_home_and_environment(pair: Sandbox) -> None:
    home = str(pair.node("i-1") / "home")
    expected = {
        "PWD": home,
        "HOME": home,
        "TMPDIR": f"{pair.node('i-1')}/tmp",
        "MICS_SHARED": str(pair.shared),
        "MICSCTL_PYTHON": "/nonexistent/python",
        "MICS_NODE": "i-1",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/imds/i-1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_DEFAULT_REGION": "us-east-1",
        "USER": pair.hello["user"],
    }
    values = pair.output("i-1", f'for n in {" ".join(expected)}; do echo "${{!n}}"; done').splitlines()
    assert dict(zip(expected, values, strict=True)) == expected
    assert pair.output("i-1", "command -v shutdown") == f"{pair.folder}/hosts/shims/shutdown"
    assert pair.output("i-1", "bash -lc 'command -v shutdown'") == f"{pair.folder}/hosts/shims/shutdown"
    assert pair.output("i-1", "grep NoNewPrivs /proc/self/status").split() == ["NoNewPrivs:", "1"]
    assert pair.ssh("i-1", "exit 7").returncode == 7


def _terminals_belong_to_their_group() -> bool:
    mounts = Path("/proc/mounts").read_text().splitlines()
    return any(line.split()[1] == "/dev/pts" and "gid=5" in line.split()[3].split(",") for line in mounts)


@pytest.mark.skipif(
    sys.platform == "linux" and not _terminals_belong_to_their_group(),
    reason="/dev/pts is mounted without gid=5 (tty), so an ordinary user's sshd may not hand out terminals",
)
def test_interactive_session_keeps_the_shims(pair: Sandbox) -> None:
    target = f"{pair.hello['user']}@{pair.ips['i-1']}"
    result = subprocess.run(
        [*pair.ssh_command("-tt"), target],
        input="cd; pwd; command -v shutdown; exit 3\n",
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert result.returncode == 3
    assert f"{pair.folder}/hosts/shims/shutdown" in result.stdout
    assert f"{pair.node('i-1')}/home" in result.stdout


def test_rsync_and_sftp_reach_the_nodes_home(pair: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("a")
    target = f"{pair.hello['user']}@{pair.ips['i-2']}"
    shell = " ".join(pair.ssh_command())
    subprocess.run(
        ["rsync", "-a", "--delete", "-e", shell, f"{tmp_path}/code/", f"{target}:code/"], check=True, timeout=15
    )
    assert (pair.node("i-2") / "home" / "code" / "a.txt").read_text() == "a"
    sftp = ["sftp", *pair.ssh_command()[1:], "-b", "-", target]
    sftp[sftp.index("-p")] = "-P"
    subprocess.run(sftp, input=f"put {tmp_path}/code/a.txt b.txt\n", text=True, check=True, timeout=15, stdout=-3)
    assert (pair.node("i-2") / "home" / "b.txt").read_text() == "a"


def test_user_data_ran_and_left_nothing_but_log_lines_in_the_shims(pair: Sandbox) -> None:
    node = pair.node("i-1")
    assert "cloud-init: finished, user data ended with 0" in pair.console("i-1")
    assert f"KEYS-----\r\nin {node}/home as {pair.who.uid}\r\ncloud-init: finished" in pair.console("i-1")
    assert (node / "home" / "made").exists()
    loop = re.search("for name in (.*); do", USER_DATA.decode())
    assert loop
    calls = [f"{name} --something /dev/x" for name in loop[1].split()]
    assert _logged(node).splitlines() == [*calls, "sudo systemctl stop anything", "shutdown -c"]


def test_elastic_ip_leads_to_the_node_it_was_routed_to(pair: Sandbox) -> None:
    public = pair.hello["public"].replace("0/24", "7")

    def owner() -> str:
        options = (
            "-o",
            f"HostKeyAlias=[{pair.ips[expected]}]:{pair.port}",
            "-o",
            f"UserKnownHostsFile={pair.known_hosts}",
        )
        return pair.ssh("", "echo $MICS_NODE", *options, address=public).stdout.strip()

    for expected in ("i-1", "i-2"):
        pair.send(op="route", ip=public, id=expected)
        wait_for(lambda expected=expected: owner() == expected, f"{public} at {expected}")
    pair.send(op="route", ip=public, id=None)

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((public, pair.port)) != 0

    wait_for(refused, "nobody at the released address")


def test_proxy_jump_through_the_head(pair: Sandbox) -> None:
    jump = " ".join([*pair.ssh_command("-W", "%h:%p"), f"{pair.hello['user']}@{pair.ips['i-1']}"])
    assert pair.ssh("i-2", "echo $MICS_NODE", "-o", f"ProxyCommand={jump}").stdout.strip() == "i-2"


def test_a_second_sandbox_takes_other_addresses(pair: Sandbox, open_sandbox: Opener) -> None:
    other = open_sandbox()
    assert other.hello["vpc"] != pair.hello["vpc"]
    assert other.hello["public"] != pair.hello["public"]


ESCAPEE = "setsid sh -c '(setsid sleep 301 &) ; sleep 302' </dev/null >/dev/null 2>&1 & env -i setsid sleep 303 &"


def test_shutdown_ends_the_instance_and_all_that_it_started(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", "i-2", user_data=f"#!/bin/sh\n{ESCAPEE}\n".encode())
    wait_for(lambda: sum("sleep" in p for p in sandbox.processes("i-1")) >= 2, "the escaped processes")
    sandbox.ssh("i-1", "sudo true; shutdown -h now")
    wait_for(lambda: sandbox.console("i-1") and sandbox.ended == ["i-1"], "the end of i-1")
    assert sandbox.processes("i-1") == []
    assert _sleepers(sandbox.who) == 1  # the other node's
    assert "BEGIN SSH HOST KEY KEYS" in sandbox.console("i-1")
    assert not (sandbox.node("i-1") / "home").exists()
    assert sandbox.output("i-2", "echo alive") == "alive"


def test_stop_and_close_leave_nothing(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", "i-2", user_data=f"#!/bin/sh\n{ESCAPEE}\n".encode())
    started = time.monotonic()
    sandbox.send(op="stop", ids=["i-1", "i-unknown"])
    wait_for(lambda: sandbox.console("i-1") and sandbox.ended == ["i-1"], "the end of i-1")
    assert time.monotonic() - started < 2
    assert sandbox.processes("i-1") == []
    sandbox.send(op="stop", ids=["i-1"])
    sandbox.close()
    assert sandbox.server.returncode == 0
    assert sandbox.processes() == []
    assert _sleepers(sandbox.who) == 0


def test_nothing_survives_kill_9_of_the_server(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", "i-2", user_data=f"#!/bin/sh\n{ESCAPEE}\n".encode())
    sandbox.ssh("i-1", "setsid sleep 304 </dev/null >/dev/null 2>&1 &")
    assert len(sandbox.processes()) >= 8
    sandbox.server.kill()
    sandbox.server.wait()
    wait_for(lambda: not sandbox.processes() and not _sleepers(sandbox.who), "the end of all", 2)


def test_kill_9_of_a_helper_is_swept_by_the_server(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", "i-2")
    sandbox.output("i-1", "setsid sleep 305 </dev/null >/dev/null 2>&1 &")
    os.kill(int((sandbox.node("i-1") / "userd.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: sandbox.console("i-1") and sandbox.ended == ["i-1"], "the end of i-1")
    assert sandbox.processes("i-1") == []
    assert sandbox.output("i-2", "echo alive") == "alive"


def test_kill_9_of_server_and_helper_is_swept_by_the_next_start(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", user_data=b"#!/bin/sh\nsetsid sleep 306\n")
    helper = int((sandbox.node("i-1") / "userd.pid").read_text())
    os.kill(helper, signal.SIGSTOP)  # so that it cannot see the server's end first
    sandbox.server.kill()
    os.kill(helper, signal.SIGKILL)
    sandbox.server.wait()
    assert len(sandbox.processes("i-1")) >= 3  # sshd, the user data, its sleep
    code = "import pathlib, sys; from micsctl.sandbox import state; "
    code += "state.sweep(state.SandboxFolder(pathlib.Path(sys.argv[1])))"
    command = [*sandbox.who.prefix, sandbox.who.python, "-c", code, str(sandbox.folder)]
    subprocess.run(command, env=sandbox.who.environment, timeout=20, check=True)
    assert sandbox.processes() == []


def _sleepers(who: User) -> int:
    """ESCAPEE's process with an empty environment, which only the process tree can tell."""
    lines = subprocess.run(["ps", "-u", str(who.uid), "-o", "args="], capture_output=True, text=True, timeout=5).stdout
    return lines.splitlines().count("sleep 303")


@pytest.mark.parametrize(
    ("user_data", "said"),
    [
        (gzip.compress(b"#!/bin/sh\nexit 3\n", mtime=0), "user data ended with 3"),
        (b"#!/nonexistent/shell\n", "the user data cannot be run: No such file or directory"),
        (b"#cloud-config\n", "the user data is not a script"),
        (gzip.compress(b"#!/bin/sh\n", mtime=0)[:-9], "the user data is not a script"),
    ],
)
def test_console_says_how_user_data_went(open_sandbox: Opener, user_data: bytes, said: str) -> None:
    sandbox = open_sandbox()
    sandbox.start("i-1", user_data=user_data)
    wait_for(lambda: said in sandbox.console("i-1"), said)
    assert sandbox.output("i-1", "echo alive") == "alive"


def test_port_in_use_names_the_port_and_its_holder(open_sandbox: Opener, user: User) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", PORT + 1))
        holder.listen()
        refused = open_sandbox(port=PORT + 1).hello
    assert refused["error"] == f"port {PORT + 1} is in use"
    owner = f"process {os.getpid()}" if user.uid == os.geteuid() else f"user {pwd.getpwuid(os.geteuid()).pw_name}"
    assert owner in refused["why"]


def test_an_address_taken_meanwhile_ends_the_instance_and_is_named_on_its_console(open_sandbox: Opener) -> None:
    sandbox = open_sandbox()
    address = sandbox.hello["vpc"].replace("0.0/16", "16.10")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, PORT))
        holder.listen()
        node = {"instance_id": "i-1", "private_ip": address, "hostname": "h", "public_key": "", "user_data": ""}
        sandbox.send(op="start", nodes=[node])
        wait_for(lambda: sandbox.console("i-1") and sandbox.ended == ["i-1"], "the end of i-1")
    assert f"Bind to port {PORT} on {address} failed" in sandbox.console("i-1")


def _python_that_claims_torch(base: Path, who: User) -> str:
    """An interpreter whose metadata names torch; the bootstrap asks no more of it, and ordinary users may lack one."""
    site = base / "site" / f"torch-{TORCH_VERSION}.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH_VERSION}\n")
    python = base / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={base}/site exec {who.python} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_real_user_data_gets_ready_and_ends_the_node_in_time(open_sandbox: Opener, user: User) -> None:
    with tempfile.TemporaryDirectory(prefix="micsctl-python-") as folder:
        Path(folder).chmod(0o755)
        sandbox = open_sandbox(node_python=_python_that_claims_torch(Path(folder), user))
        real_home = Path(pwd.getpwuid(user.uid).pw_dir)
        before, mounts = _names(real_home), Path("/proc/mounts").read_text()
        ends_at = datetime.now(UTC) + timedelta(hours=1)
        script = render_bootstrap(cluster="demo", ssh_user="ubuntu", ends_at=ends_at, check_seconds=1)
        sandbox.start("i-1", user_data=script.encode())
        ready = sandbox.node("i-1") / "home" / ".micsctl" / "ready"
        log = ready.with_name("bootstrap.log")
        wait_for(ready.exists, lambda: f"the end of the bootstrap: {log.read_text()}", 20)
        assert ready.read_text() == "ok\n", log.read_text()
        assert sandbox.output("i-1", "~/.micsctl/python -c 'print(6 * 7)'") == "42"
        assert "shutdown" not in _logged(sandbox.node("i-1"))
        assert _names(real_home) == before
        assert str(sandbox.folder) not in Path("/proc/mounts").read_text()
        assert Path("/proc/mounts").read_text() == mounts
        sandbox.ssh("i-1", "echo 1000000000 >~/.micsctl/ends_at")
        wait_for(lambda: sandbox.console("i-1") and sandbox.ended == ["i-1"], "the end of the TTL")
        assert _logged(sandbox.node("i-1")).splitlines() == ["shutdown -h now"]
        assert sandbox.processes("i-1") == []


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _logged(node: Path) -> str:
    """Calls of the shims, without their times."""
    log = node / "shims.log"
    return "\n".join(line.split(" ", 1)[1] for line in log.read_text().splitlines()) if log.exists() else ""


@pytest.mark.skipif(os.geteuid() != 0 or Path("/run/systemd/system").exists(), reason="for root without systemd")
def test_roots_nodes_may_log_in_but_do_nothing_privileged(open_sandbox: Opener) -> None:
    sandbox = open_sandbox(who=User(0, sys.executable))
    sandbox.start("i-1")
    probe = (
        '/bin/mount -t tmpfs none "$TMPDIR"; echo "mount $?"; unshare --mount true; echo "unshare $?"; '
        'ip link add mics-test type dummy; echo "ip $?"; '
        # with a command that does not exist: EINVAL (22) for whoever may reboot, EPERM (1) for all others
        f"{sys.executable} -c 'import ctypes; c = ctypes.CDLL(None, use_errno=True); c.reboot(4660);"
        ' print("reboot", ctypes.get_errno())\''
    )
    answers = dict(line.split() for line in sandbox.ssh("i-1", probe).stdout.splitlines())
    assert answers.pop("reboot") == "1"
    assert set(answers) == {"mount", "unshare", "ip"}
    assert "0" not in answers.values()
    status = sandbox.output("i-1", "grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs)' /proc/self/status").split()
    allowed = 1 << 6 | 1 << 7 | 1 << 18  # setgid, setuid, chroot
    assert [int(value, 16) & ~allowed for value in status[1:6:2]] == [0, 0, 0]
    assert status[-1] == "1"


def test_missing_sshd_is_a_usage_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SYSTEM_PATH", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError) as raised:
        process._find_programs()
    assert raised.value.why == "not installed: sshd, ssh-keygen, bash, rsync"
    assert "openssh-server" in raised.value.next


def test_sshd_is_found_outside_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert Path(process._find_programs().sshd).is_absolute()


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "/nonexistent/sh"])
def test_an_account_without_a_shell_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    account = pwd.struct_passwd(("ci", "x", 1234, 1234, "", "/", shell))
    monkeypatch.setattr(process.os, "geteuid", lambda: 1234)
    monkeypatch.setattr(process.pwd, "getpwuid", lambda _: account)
    with pytest.raises(UsageError, match="process level") as raised:
        process._account()
    assert shell in raised.value.why
