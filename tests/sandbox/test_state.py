"""The sandbox's folder, lock, sweep; and the pure parts: signatures, faults, metadata, the image."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from micsctl.aws.session import connect
from micsctl.cli.sandbox import _fault_line
from micsctl.errors import MicsctlError, UsageError
from micsctl.home import Home
from micsctl.sandbox import auth, control, image, imds, noded, process, state
from micsctl.sandbox.application import Application
from micsctl.sandbox.faults import Fault, FaultBook
from micsctl.sandbox.roles import RoleKeys
from micsctl.sandbox.state import SandboxFolder
from micsctl.spec import SandboxSpec

KEY = auth.Key("AKIAABCDEFGHIJKLMNOP", "secret/with+signs")


# --- folder and lock


def test_one_owner(tmp_path: Path) -> None:
    folder = SandboxFolder(tmp_path / "sandbox")
    assert not state.is_owned(folder)
    lock = state.acquire(folder)
    assert lock is not None
    assert folder.path.stat().st_mode & 0o777 == 0o700
    held = "from pathlib import Path; from micsctl.sandbox import state as s;"
    held += f"f = s.SandboxFolder(Path({str(folder.path)!r}))"
    other = subprocess.run(
        [sys.executable, "-c", f"{held}; print(s.is_owned(f), s.acquire(f))"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert other.stdout.split() == ["True", "None"], other.stderr
    os.close(lock)
    assert not state.is_owned(folder)


def test_who_only_asks_does_not_keep_an_owner_away(tmp_path: Path) -> None:
    folder = SandboxFolder(tmp_path / "sandbox")
    folder.path.mkdir()
    folder.lock.touch()
    with folder.lock.open("r+") as asking:  # as `is_owned` does it, in another command
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.3, lambda: fcntl.flock(asking, fcntl.LOCK_UN)).start()
        lock = state.acquire(folder)
    assert lock is not None
    os.close(lock)


def test_a_removed_lock_file_is_no_lock(tmp_path: Path) -> None:
    folder = SandboxFolder(tmp_path / "sandbox")
    stale = state.acquire(folder)
    state.remove(folder.path)
    fresh = state.acquire(folder)
    assert fresh is not None
    assert stale is not None
    assert os.fstat(fresh).st_ino == folder.lock.stat().st_ino
    os.close(stale)
    os.close(fresh)


def test_ids_differ_and_fit_into_an_interface_name(tmp_path: Path) -> None:
    folders = [SandboxFolder(tmp_path / name) for name in "ab"]
    assert folders[0].id != folders[1].id
    assert all(len(folder.interface) <= 15 for folder in folders)


def test_a_pid_that_was_reused_is_another_process() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        found = state.process(child.pid)
        assert found.alive
        assert not replace(found, start_ticks=found.start_ticks - 1).alive
    finally:
        child.kill()
    # still a zombie, and no longer alive
    wait_until(lambda: not found.alive)
    child.wait()


def test_sweep_kills_what_carries_the_mark_and_nothing_else(tmp_path: Path) -> None:
    folder = SandboxFolder(tmp_path / "sandbox")
    lock = state.acquire(folder)
    assert lock is not None
    (folder.path / "closed" / "inner").mkdir(parents=True)
    (folder.path / "closed").chmod(0)
    ours = subprocess.Popen(["sleep", "60"], env={**os.environ, state.MARK: folder.id})
    others = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, state.MARK: "00000000"}),
        # somebody's editor or `tail -f` on the files of a node
        *(
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"{folder.path}/{name}"])
            for name in ("server.log", "hosts/nodes/i-1/sshd.log", "micsctl.sandbox.notes", "userd.py")
        ),
    ]
    try:
        wait_until(lambda: [one.pid for one in state.processes(folder)] == [ours.pid])
        assert state.leftovers(folder).total == 2
        state.sweep(folder)
        assert ours.wait(5) == -signal.SIGKILL
        assert all(other.poll() is None for other in others)
        assert os.listdir(folder.path) == ["lock"]
    finally:
        for child in (ours, *others):
            child.kill()
            child.wait()
        os.close(lock)


def test_sshd_is_known_by_its_configuration_file() -> None:
    folder = SandboxFolder(Path("/home/me/sandbox"))
    config = "/home/me/sandbox/hosts/nodes/i-1/sshd_config"
    ours = [
        f"/usr/sbin/sshd\0-D\0-f\0{config}\0",
        f"sshd: /usr/sbin/sshd -D -f {config} [listener] 0 of 100 startups\0",
    ]
    others = ["/usr/sbin/sshd\0-D\0-f\0/home/me/sandbox2/sshd_config\0", f"vi\0-f\0{config}\0", f"less\0{config}\0", ""]
    assert all(state._is_sshd_of(folder, command.encode()) for command in ours)
    assert not any(state._is_sshd_of(folder, command.encode()) for command in others)


def test_state_file_is_closed_to_others(tmp_path: Path) -> None:
    folder = SandboxFolder(tmp_path)
    assert state.read_state(folder) is None
    state.write_state(folder, {"key": "secret"})
    assert folder.state.stat().st_mode & 0o777 == 0o600
    assert state.read_state(folder) == {"key": "secret"}


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- the server's life, without hosts


def test_start_status_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(control.LEVEL_VARIABLE, "none")
    home = Home(tmp_path / "home")
    assert control.status(home) is None
    assert control.stop(home).total == 0
    with pytest.raises(UsageError, match="no sandbox runs"):
        control.faults(home)
    found: list[int] = []
    starters = [threading.Thread(target=lambda: found.append(ensure(home).pid)) for _ in range(3)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    try:
        assert len(found) == 3
        assert len(set(found)) == 1  # whoever comes second finds the first one's server
        info = control.status(home)
        assert info is not None
        assert info.pid == found[0] == ensure(home).pid
        assert os.getsid(info.pid) == info.pid != os.getsid(0)
        assert os.readlink(f"/proc/{info.pid}/cwd") == "/"
        with pytest.raises(UsageError, match="refused"):
            control._ask(control._running(home), "POST", "faults", {"action": "RunInstances", "codee": "x"})
        # nothing lives in it, so another wish is another server
        other = control.ensure(home, SandboxSpec(devices_per_node=4), "ubuntu")
        assert (other.devices_per_node, other.pid == info.pid) == (4, False)
        os.kill(other.pid, signal.SIGKILL)
        wait_until(lambda: not owned(home))
        assert home.sandbox.exists()
        assert ensure(home).pid != other.pid
    finally:
        assert control.stop(home).total == 0
    assert not home.sandbox.exists()
    assert control.leftovers(home).total == 0


def test_the_laptops_aws_settings_play_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[default\nbroken")
    for name in ("HTTP_PROXY", "http_proxy", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "true")
    monkeypatch.setenv(control.LEVEL_VARIABLE, "none")
    home = Home(tmp_path / "home")
    try:
        aws = connect(ensure(home).settings)
        assert [vpc["IsDefault"] for vpc in aws.ec2.describe_vpcs()["Vpcs"]] == [True]
    finally:
        assert control.stop(home).total == 0


def test_a_server_whose_folder_is_removed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(control.LEVEL_VARIABLE, "none")
    home = Home(tmp_path / "home")
    server = state.process(ensure(home).pid)
    shutil.rmtree(home.folder)
    wait_until(lambda: not server.alive)
    assert not home.sandbox.exists()


def ensure(home: Home) -> control.SandboxInfo:
    return control.ensure(home, SandboxSpec(), "ubuntu")


def owned(home: Home) -> bool:
    return state.is_owned(SandboxFolder(home.sandbox))


def test_a_level_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from micsctl.sandbox import netns

    monkeypatch.setattr(netns, "why_impossible", lambda: "no namespaces here")
    monkeypatch.setattr(control, "_require_programs", lambda level: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert control.choose_level(SandboxSpec()) == ("process", "no namespaces here")
    with pytest.raises(UsageError, match="netns level"):
        control.choose_level(SandboxSpec(level="netns"))


def test_root_in_a_container_gets_the_process_level_and_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers are often root in a container without namespaces."""
    from micsctl.sandbox import netns

    monkeypatch.setattr(netns, "why_impossible", lambda: "no namespaces here")
    monkeypatch.setattr(control, "_require_programs", lambda level: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert control.choose_level(SandboxSpec()) == ("process", "no namespaces here")
    with pytest.raises(UsageError, match="netns level") as raised:
        control.choose_level(SandboxSpec(level="netns"))
    assert "no namespaces here" in raised.value.why


def test_root_on_a_machine_of_systemd_is_refused_the_process_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/run/systemd/system")
    with pytest.raises(UsageError, match="process level") as raised:
        process._account()
    assert "systemd" in raised.value.why


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.sandbox.mkdir()
    os.chown(home.sandbox, 12345, 12345)
    for act in (ensure, control.status, control.stop, control.leftovers):
        with pytest.raises(UsageError, match="not yours") as raised:
            act(home)
        assert "12345" in raised.value.why


def test_without_moto_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(control.LEVEL_VARIABLE, "none")
    monkeypatch.setattr(control.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        ensure(Home(tmp_path))
    assert "micsctl[sandbox]" in raised.value.next


def test_a_hanging_server_is_still_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(control.LEVEL_VARIABLE, "none")
    monkeypatch.setattr(control, "_ENDING_SECONDS", 0.2)
    monkeypatch.setattr(control, "_STOP_SECONDS", 0.5)
    home = Home(tmp_path)
    info = ensure(home)
    os.kill(info.pid, signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError):
        monkeypatch.setattr(control, "_ask", lambda *_: (_ for _ in ()).throw(MicsctlError("no answer")))
        left = control.stop(home)
        assert left.resources == ("unknown: no answer",)
        assert left.total == 1
    assert not home.sandbox.exists()


# --- signatures


def signed(url: str, method: str, body: bytes, headers: dict[str, str], service: str) -> auth.Request:
    """As botocore signs it."""
    request = AWSRequest(method=method, url=url, data=body, headers=dict(headers))
    SigV4Auth(Credentials(KEY.access_key, KEY.secret_key), service, "us-east-1").add_auth(request)
    _, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    path, _, query = f"/{path}".partition("?")
    found = {name.lower(): value for name, value in request.headers.items()} | {"host": host}
    return auth.Request(method, path, query, found, body)


def refused(request: auth.Request, key: auth.Key, now: datetime) -> str:
    why = auth.refusal(request, key, now)
    return why.code if why else ""


@settings(max_examples=50, deadline=None)
@given(
    body=st.binary(max_size=200),
    value=st.text(st.characters(codec="ascii", exclude_characters="\r\n\x00", min_codepoint=32), max_size=30),
    path=st.sampled_from(["/", "/a/b%20c", "/latest/x~y"]),
    query=st.sampled_from(["", "a=1&b=2", "b=2&a=%2F&a=%20", "empty="]),
)
def test_what_botocore_signs_is_accepted_and_nothing_else(body: bytes, value: str, path: str, query: str) -> None:
    url = f"http://127.0.0.1:5000{path}" + (f"?{query}" if query else "")
    request = signed(url, "POST", body, {"X-Amz-Thing": value, "Content-Type": "text/plain"}, "ec2")
    now = datetime.now(UTC)
    assert auth.refusal(request, KEY, now) is None
    assert refused(request, replace(KEY, secret_key="other"), now) == "SignatureDoesNotMatch"
    assert refused(request, replace(KEY, access_key="AKIAPONMLKJIHGFEDCBA"), now) == "InvalidAccessKeyId"
    assert auth.refusal(replace(request, body=body + b"x"), KEY, now) is not None
    assert auth.refusal(replace(request, method="PUT"), KEY, now) is not None
    assert auth.refusal(replace(request, path=path + "x"), KEY, now) is not None
    assert auth.refusal(replace(request, query="a=3"), KEY, now) is not None
    assert refused(request, KEY, now + timedelta(minutes=6)) == "RequestTimeTooSkewed"
    assert refused(replace(request, headers={}), KEY, now) == "AccessDenied"
    # its reader compares the body with what the request claims; where it claims nothing, nothing binds the body
    without = {name: value for name, value in request.headers.items() if name != "x-amz-content-sha256"}
    assert refused(replace(request, body=None, headers=without), KEY, now) == "InvalidRequest"


def test_our_own_signature_is_accepted() -> None:
    request = auth.Request("GET", "/_sandbox/about", "", {"host": "127.0.0.1:1"}, b"")
    now = datetime.now(UTC)
    headers = auth.sign(request, KEY, now, service="sandbox")
    assert auth.refusal(replace(request, headers=headers), KEY, now) is None
    assert auth.refusal(replace(request, headers={**headers, "host": "elsewhere"}), KEY, now) is not None


# --- faults


def test_faults_are_used_up() -> None:
    book = FaultBook()
    book.add(Fault("RunInstances", "InsufficientInstanceCapacity", zone="a", times=2, skip=1))
    assert book.hit("RunInstances") is None  # without a zone: before it is known
    assert book.hit("RunInstances", "b") is None
    hits = [book.hit("RunInstances", "a") for _ in range(4)]
    assert [hit is not None for hit in hits] == [False, True, True, False]
    assert hits[1] is not None
    assert hits[1].http_status == 500
    book.clear()
    book.add(Fault("*", "RequestLimitExceeded"))
    book.add(Fault("RunInstances", "DelayedVisibility", times=1, seconds=3))
    assert (book.hit("DescribeVpcs"), book.hidden_seconds(), book.hidden_seconds()) == (book.all()[0], 3, 0)


def test_a_spot_interruption_is_announced_until_it_is_due_once() -> None:
    book = FaultBook()
    book.add(Fault("*", "SpotInterruption", instance="i-1"), now=1000.0)
    book.add(Fault("*", "SpotInterruption", seconds=500), now=1000.0)
    assert book.hit("DescribeInstances") is None  # it answers no request
    assert (book.interrupted_at("i-1"), book.interrupted_at("i-2")) == (1120.0, 1500.0)  # AWS's two minutes; ours
    assert book.due(1119.9) == []
    [due] = book.due(1120.0)
    assert due.instance == "i-1"
    assert (book.due(1120.0), book.interrupted_at("i-1")) == ([], 1500.0)
    assert [_fault_line(fault) for fault in book.all()] == [
        "* -> SpotInterruption of i-1: used up",
        "* -> SpotInterruption: at 00:25:00 UTC",
    ]
    book.clear()
    assert (book.due(9999.0), book.interrupted_at("i-2")) == ([], None)


@pytest.mark.parametrize("data", [{}, {"action": "x"}, {"action": "x", "code": "y", "more": 1}])
def test_a_wrong_fault_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="keys"):
        Fault.from_json(data)


@given(st.builds(Fault, action=st.text(), code=st.text(), zone=st.none() | st.text(), times=st.none() | st.integers()))
def test_faults_travel_as_json(fault: Fault) -> None:
    assert Fault.from_json(json.loads(json.dumps(fault.as_json()))) == fault


# --- the metadata service

FACTS = imds.InstanceFacts(
    instance_id="i-0123456789abcdef0",
    instance_type="p4d.24xlarge",
    image_id="ami-1",
    launch_index=0,
    private_ip="10.77.0.4",
    private_dns="ip-10-77-0-4.ec2.internal",
    public_ip="198.18.77.1",
    mac="02:00:00:00:00:01",
    subnet_id="subnet-1",
    vpc_id="vpc-1",
    zone="us-east-1a",
    region="us-east-1",
    placement_group="pg",
    account="123456789012",
    security_groups=("nodes",),
    role="trainer",
    tags={"Name": "x"},
    user_data=b"#!/bin/sh",
    tokens_required=True,
    enabled=True,
    tags_allowed=True,
    interrupted_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)


def ask(service: imds.MetadataService, path: str, method: str = "GET", **headers: str) -> tuple[str, str]:
    seen: list[str] = []
    environ = {"PATH_INFO": path, "REQUEST_METHOD": method, "REMOTE_ADDR": "10.77.0.4"}
    environ |= {f"HTTP_X_{name.upper()}": value for name, value in headers.items()}
    body = b"".join(service(environ, lambda status, _: seen.append(status)))
    return seen[0][:3], body.decode()


def test_metadata() -> None:
    roles = RoleKeys()
    service = imds.MetadataService(lambda address, instance_id: {"10.77.0.4": FACTS}.get(address or instance_id), roles)
    _, token = ask(service, "/latest/api/token", "PUT", aws_ec2_metadata_token_ttl_seconds="60")

    def get(path: str) -> tuple[str, str]:
        return ask(service, f"/latest/meta-data/{path}", aws_ec2_metadata_token=token)

    assert get("public-ipv4") == ("200", "198.18.77.1")
    assert get("placement/group-name") == ("200", "pg")
    assert get("iam/security-credentials/") == ("200", "trainer")
    credentials = json.loads(get("iam/security-credentials/trainer")[1])
    known = roles.find(credentials["Token"])
    assert known
    assert (known.instance_id, known.role) == (FACTS.instance_id, "trainer")
    assert known.key == auth.Key(credentials["AccessKeyId"], credentials["SecretAccessKey"])
    assert json.loads(get("spot/instance-action")[1]) == {"action": "terminate", "time": "2026-01-02T03:04:05Z"}
    assert get("tags/instance/Name") == ("200", "x")
    assert get("nothing")[0] == get("instance-id/more")[0] == "404"
    assert ask(service, "/latest/meta-data/")[0] == "401"
    assert ask(service, "/latest/meta-data/", aws_ec2_metadata_token=f"9{token}")[0] == "401"
    assert ask(service, "/latest/api/token", "PUT", aws_ec2_metadata_token_ttl_seconds="21601")[0] == "400"
    assert ask(service, "/latest/meta-data/", forwarded_for="1.2.3.4")[0] == "403"
    assert ask(service, "/i-0123456789abcdef0/latest/meta-data/instance-id")[0] == "401"


def test_metadata_at_process_level_needs_the_secret() -> None:
    instance_id = "i-0123456789abcdef0"
    facts = {instance_id: replace(FACTS, tokens_required=False), "10.77.0.4": FACTS}
    service = imds.MetadataService(lambda address, instance_id: facts.get(address or instance_id), RoleKeys(), "secret")
    assert ask(service, f"/secret/{instance_id}/latest/meta-data/instance-id") == ("200", instance_id)
    _, token = ask(service, f"/secret/{instance_id}/latest/api/token", "PUT", aws_ec2_metadata_token_ttl_seconds="60")
    assert ask(service, f"/secret/{instance_id}/latest/user-data", aws_ec2_metadata_token=token)[0] == "200"
    for wrong in (
        "/secret/i-00000000000000000/latest/meta-data/instance-id",
        f"/other/{instance_id}/latest/meta-data/instance-id",
        f"/{instance_id}/latest/meta-data/instance-id",
        f"/\xe9/{instance_id}/latest/user-data",
        "/latest/meta-data/instance-id",
        "/secret",
        "/",
    ):
        assert ask(service, wrong) == ("404", ""), wrong


# --- the server


@pytest.mark.parametrize("target", [{}, {"HTTP_X_AMZ_TARGET": "AmazonSSM.GetParameter"}])
def test_a_fault_of_the_emulator_is_logged_and_readable(
    target: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(environ: Any, start_response: Any) -> Any:
        raise KeyError("<x>")

    application = Application(KEY, RoleKeys(), FaultBook(), broken, broken, threading.RLock(), dict)
    request = auth.Request("POST", "/", "", {"host": "127.0.0.1:1"}, b"")
    headers = auth.sign(request, KEY, datetime.now(UTC), service="ec2")
    environ = {f"HTTP_{name.replace('-', '_').upper()}": value for name, value in headers.items()} | target
    environ |= {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "wsgi.input": io.BytesIO()}
    seen: list[str] = []
    body = b"".join(application(environ, lambda status, _: seen.append(status))).decode()
    assert seen == ["500 Internal Server Error"]
    assert "InternalError" in body
    if target:
        assert json.loads(body)["__type"] == "InternalError"
    else:
        assert ElementTree.fromstring(body).tag == "Response"
    assert "Traceback" in capsys.readouterr().err


# --- the image

TABLE = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /proc rw - proc proc rw
24 22 0:6 / /home rw - xfs /dev/vdb rw
25 22 0:7 / /mnt/a\\040b rw - overlay overlay rw
"""


def test_mounts_decide_what_is_bound() -> None:
    points = image.mount_points(TABLE)
    assert points == ["/", "/home", "/mnt/a b"]
    assert image.needs_bind("/home/me/.venv", points)
    assert image.needs_bind("/tmp/venv", points)
    assert image.needs_bind("/mnt", points)
    assert not image.needs_bind("/usr/local", points)
    assert not image.needs_bind("/homes/me", points)
    assert noded.filesystem_of(Path("/home/me"), TABLE) == "xfs"
    assert noded.filesystem_of(Path("/mnt/a b/c"), TABLE) == "overlay"
    assert noded.filesystem_of(Path("/var"), TABLE) == "ext4"


def test_python_roots_hold_this_interpreter() -> None:
    roots = image.python_roots()
    for path in (Path(os.path.realpath(sys.executable)), Path(pytest.__file__)):
        assert any(root in path.parents for root in roots)
    assert not any(one != other and one in other.parents for one in roots for other in roots)


@pytest.mark.skipif(os.geteuid() != 0, reason="character devices need root")
def test_the_layer_hides_and_opens(tmp_path: Path) -> None:
    secret = tmp_path / "home" / ".ssh"
    secret.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    tree = tmp_path / "tree"
    tree.mkdir()
    made = image.build(tree, "ubuntu", "12345678", [secret, tmp_path / "missing"])
    hidden = tree / str(secret).lstrip("/")
    assert hidden.is_char_device()
    assert hidden.parent.stat().st_mode & 0o777 == 0o700
    line = next(one for one in (tree / "etc/passwd").read_text().splitlines() if one.startswith("ubuntu:"))
    assert line == f"ubuntu:x:{made.uid}:{made.gid}::/home/ubuntu:/bin/bash"
    assert "ubuntu:*:" in (tree / "etc/shadow").read_text()
    assert (tree / "etc/shadow").stat().st_mode & 0o777 == 0o600
    assert os.access(tree / "usr/sbin/shutdown", os.X_OK)
