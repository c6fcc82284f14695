"""The netns level: real SSH hosts in namespaces of their own. Needs root."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from micsctl.errors import UsageError
from micsctl.home import Home
from micsctl.sandbox import control
from micsctl.sandbox.control import SandboxInfo
from micsctl.sandbox.netns import measured_link_mbps, overlapping, token_bucket, why_impossible
from micsctl.spec import SandboxSpec

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
USER_DATA = """#!/bin/bash
echo "user data as $(id -un) on $(hostname), HOME is ${HOME-unset}"
touch /root/micsctl-test-of-user-data
(sleep 1000 &)
"""
SSH = ["-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR"]
PYTHON = "/opt/pytorch/bin/python"
CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Nodes:
    """A cluster as `up` makes it: an Elastic IP on node 0, the others through it."""

    home: Home
    info: SandboxInfo
    ec2: Any
    ids: list[str]
    private_ips: list[str]
    public_ip: str
    key: Path
    known_hosts: Path

    def ssh_command(self, index: int, *more: str) -> list[str]:
        options = ["ssh", "-i", str(self.key), "-o", f"UserKnownHostsFile={self.known_hosts}", *SSH]
        head = f"ubuntu@{self.public_ip}"
        if index == 0:
            return [*options, *more, head]
        proxy = " ".join(map(shlex.quote, [*options, "-W", "%h:%p", head]))
        return [*options, "-o", f"ProxyCommand={proxy}", *more, f"ubuntu@{self.private_ips[index]}"]

    def run(self, index: int, command: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self.ssh_command(index), command], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done.stdout.strip()

    def python(self, index: int, script: str) -> Any:
        """What the script prints as JSON."""
        return json.loads(self.run(index, f"{PYTHON} -c {shlex.quote(textwrap.dedent(script))}"))

    def state(self, index: int) -> str:
        found = self.ec2.describe_instances(InstanceIds=[self.ids[index]])["Reservations"]
        return str(found[0]["Instances"][0]["State"]["Name"])


def boot(
    home: Home, info: SandboxInfo, client: Callable[..., Any], wait_for: Callable[..., Any], folder: Path, count: int
) -> Nodes:
    settings = info.settings
    ec2 = client(info)
    image = client(info, "ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"]
    vpc = ec2.create_vpc(CidrBlock=settings.vpc_cidr)["Vpc"]["VpcId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][0]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    block = settings.vpc_cidr.replace("/16", "/20")
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
    ec2.authorize_security_group_ingress(
        GroupId=group,
        IpPermissions=[
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": settings.caller_cidr}]}
        ],
    )
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=10)
    ec2.import_key_pair(KeyName="key", PublicKeyMaterial=key.with_suffix(".pub").read_bytes())
    places = [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only")]
    launched = ec2.run_instances(
        ImageId=image,
        InstanceType="p4d.24xlarge",
        MinCount=count,
        MaxCount=count,
        KeyName="key",
        UserData=USER_DATA,
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"HttpTokens": "required"},
        NetworkInterfaces=[
            {"NetworkCardIndex": c, "DeviceIndex": d, "InterfaceType": kind, "SubnetId": subnet, "Groups": [group]}
            for c, d, kind in places
        ],
    )["Instances"]
    ids = [one["InstanceId"] for one in launched]

    def ready() -> bool:
        rows = ec2.describe_instance_status(InstanceIds=ids)["InstanceStatuses"]
        return [row["InstanceStatus"]["Status"] for row in rows] == ["ok"] * count

    wait_for(ready)
    address = ec2.allocate_address(Domain="vpc")
    interface = launched[0]["NetworkInterfaces"][0]["NetworkInterfaceId"]
    ec2.associate_address(AllocationId=address["AllocationId"], NetworkInterfaceId=interface)
    private_ips = [one["PrivateIpAddress"] for one in launched]
    known_hosts = folder / "known_hosts"
    lines = []
    for index, instance_id in enumerate(ids):
        text = wait_for(lambda one=instance_id: host_keys(ec2, one))
        names = private_ips[index] + ("" if index else f",{address['PublicIp']}")
        lines += [f"{names} {kind} {data}" for kind, data in text]
    known_hosts.write_text("\n".join(lines) + "\n")
    return Nodes(home, info, ec2, ids, private_ips, address["PublicIp"], key, known_hosts)


def host_keys(ec2: Any, instance_id: str) -> list[tuple[str, str]]:
    output = ec2.get_console_output(InstanceId=instance_id, Latest=True).get("Output", "")
    block = re.search(r"BEGIN SSH HOST KEY KEYS(.*)END SSH HOST KEY KEYS", output, re.DOTALL)
    return re.findall(r"((?:ssh|ecdsa)-\S+) (AAAA\S+)", block[1]) if block else []


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory,
    running: Callable[..., Any],
    client: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("netns")
    with running(folder / "home", "netns") as (home, info):
        yield boot(home, info, client, wait_for, folder, 2)


def test_each_node_is_a_machine(nodes: Nodes) -> None:
    assert nodes.info.level == "netns"
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "uts")]
    seen = set(own)
    for index, address in enumerate(nodes.private_ips):
        lines = nodes.run(
            index,
            "hostname; id -un; pwd; ip -4 -o address show dev eth0; tr '\\0' ' ' </proc/1/cmdline; echo;"
            " df --output=target /dev/shm | tail -n 1; command -v rsync; readlink /proc/self/ns/{net,pid,uts}",
        ).splitlines()
        assert lines[:3] == [f"ip-{address.replace('.', '-')}", "ubuntu", "/home/ubuntu"]
        assert f" {address}/20 " in lines[3]
        assert "sshd" in lines[4]
        assert lines[5] == "/dev/shm"
        assert lines[6].endswith("/rsync")
        seen |= set(lines[7:])
    assert len(seen) == 9


def test_user_data_ran_as_root_and_shows_on_the_console(nodes: Nodes, wait_for: Callable[..., Any]) -> None:
    for index, instance_id in enumerate(nodes.ids):

        def finished(instance_id: str = instance_id) -> str:
            text = nodes.ec2.get_console_output(InstanceId=instance_id, Latest=True).get("Output", "")
            return text if "user data ended with 0" in text else ""

        name = nodes.run(index, "hostname")
        assert f"user data as root on {name}, HOME is unset" in wait_for(finished)
        assert "user data as root" in nodes.run(index, "cat /var/log/cloud-init-output.log")
    assert not Path("/root/micsctl-test-of-user-data").exists()


def test_console_shows_both_styles_of_host_keys(nodes: Nodes) -> None:
    outputs = [nodes.ec2.get_console_output(InstanceId=one, Latest=True)["Output"] for one in nodes.ids]
    assert sorted("ec2: -----BEGIN SSH HOST KEY KEYS" in text for text in outputs) == [False, True]
    assert all("\r\n" in text for text in outputs)


def test_a_changed_host_key_is_noticed(nodes: Nodes, tmp_path: Path) -> None:
    lines = nodes.known_hosts.read_text().splitlines()
    other = next(line.split()[2] for line in reversed(lines) if "ed25519" in line)
    (tmp_path / "known_hosts").write_text(f"{nodes.public_ip} ssh-ed25519 {other}\n")
    command = [part.replace(str(nodes.known_hosts), str(tmp_path / "known_hosts")) for part in nodes.ssh_command(0)]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 255


def test_elastic_addresses_lead_in_and_private_ones_do_not(nodes: Nodes) -> None:
    assert reachable(nodes.public_ip)
    assert not any(reachable(address) for address in nodes.private_ips)
    # among themselves
    assert nodes.run(0, f"timeout 5 bash -c '</dev/tcp/{nodes.private_ips[1]}/22' && echo open") == "open"
    # nor does anything of this machine's network stand open to them
    assert nodes.run(0, "timeout 3 bash -c '</dev/tcp/192.0.2.1/80' 2>/dev/null || echo closed") == "closed"


def test_an_address_needs_its_rules(nodes: Nodes, wait_for: Callable[..., Any]) -> None:
    [group] = nodes.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["nodes"]}])[
        "SecurityGroups"
    ]
    ssh_rule = {"GroupId": group["GroupId"], "IpPermissions": group["IpPermissions"]}
    nodes.ec2.revoke_security_group_ingress(**ssh_rule)
    wait_for(lambda: not reachable(nodes.public_ip))
    nodes.ec2.authorize_security_group_ingress(**ssh_rule)
    wait_for(lambda: reachable(nodes.public_ip))


def reachable(address: str) -> bool:
    done = subprocess.run(["timeout", "3", "bash", "-c", f"</dev/tcp/{address}/22"], capture_output=True, timeout=10)
    return done.returncode == 0


def test_links_are_shaped_both_ways(nodes: Nodes) -> None:
    assert (nodes.info.link_mbps, nodes.info.shaped) == (400, True)
    serve = """
        import json, socket, time
        server = socket.create_server(("", 29999)); peer, _ = server.accept()
        got, start = 0, time.time()
        while data := peer.recv(1 << 20): got += len(data)
        print(json.dumps([got, time.time() - start]))
    """
    send = f"""
        import json, socket, time
        sent_bytes = lambda: int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
        for _ in range(100):
            try: peer = socket.create_connection(("{nodes.private_ips[0]}", 29999)); break
            except OSError: time.sleep(0.1)
        before, block = sent_bytes(), bytes(1 << 20)
        for _ in range(40): peer.sendall(block)
        peer.shutdown(socket.SHUT_WR); peer.recv(1)
        print(json.dumps(sent_bytes() - before))
    """
    script = shlex.quote(textwrap.dedent(serve))
    receiver = subprocess.Popen([*nodes.ssh_command(0), f"{PYTHON} -c {script}"], stdout=subprocess.PIPE, text=True)
    try:
        on_wire = nodes.python(1, send)
        output, _ = receiver.communicate(timeout=30)
    finally:
        receiver.kill()
        receiver.wait()
    payload, seconds = json.loads(output)
    assert payload == 40 << 20
    assert payload * 8 / seconds / 1e6 < 440  # the burst passes at once
    assert payload <= on_wire < 1.02 * payload


def test_torch_is_there_for_the_login_user(nodes: Nodes) -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    found = nodes.python(
        0,
        """
        import json, sys
        from importlib.metadata import version
        import importlib.util
        print(json.dumps([sys.executable, version("torch"), importlib.util.find_spec("torch").origin]))
        """,
    )
    assert found == [PYTHON, version("torch"), torch.origin]
    assert nodes.run(0, f"touch {Path(torch.origin).parent}/x 2>/dev/null || echo denied") == "denied"
    assert nodes.run(0, f"{PYTHON} -c 'import torch; print(torch.ones(2).sum().item())'") == "2.0"


def test_names_resolve_without_waiting(nodes: Nodes) -> None:
    other = f"ip-{nodes.private_ips[1].replace('.', '-')}.ec2.internal"
    answer = nodes.python(
        0,
        f"""
        import json, socket, time
        start = time.time()
        address = socket.gethostbyname("{other}")
        name = socket.gethostbyaddr("{nodes.private_ips[1]}")[0]
        for missing in ("nowhere.example", "10.99.99.99"):
            try: socket.gethostbyaddr(missing)
            except OSError: pass
        print(json.dumps([address, name, time.time() - start]))
        """,
    )
    assert answer[:2] == [nodes.private_ips[1], other]
    assert answer[2] < 1.0


def test_the_shared_folder_is_one(nodes: Nodes) -> None:
    nodes.run(0, "mkdir /fsx/demo && echo from node 0 >/fsx/demo/word")
    assert nodes.run(1, "cat /fsx/demo/word") == "from node 0"
    assert (nodes.info.shared_folder / "demo" / "word").read_text() == "from node 0\n"


def test_nodes_do_not_see_this_machines_secrets(nodes: Nodes) -> None:
    state = nodes.home.sandbox / "state.json"
    assert state.exists()
    for path in (nodes.home.sandbox, Path.home() / ".ssh", Path.home() / ".aws", nodes.home.folder / "clusters"):
        assert nodes.run(0, f"ls -d {path} 2>/dev/null || echo hidden") == "hidden"
    with tempfile.NamedTemporaryFile(dir="/tmp") as mine:
        assert nodes.run(0, f"ls {mine.name} 2>/dev/null || echo hidden") == "hidden"


def test_metadata_service(nodes: Nodes) -> None:
    found = nodes.python(
        1,
        """
        import json, urllib.request, urllib.error
        base = "http://169.254.169.254/latest/"
        def ask(path, method="GET", **named):
            headers = {name.replace("_", "-"): value for name, value in named.items()}
            request = urllib.request.Request(base + path, method=method, headers=headers)
            try: return urllib.request.urlopen(request, timeout=5).read().decode()
            except urllib.error.HTTPError as error: return error.code
        token = ask("api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
        get = lambda path: ask(path, X_aws_ec2_metadata_token=token)
        print(json.dumps({
            "no token": ask("meta-data/instance-id"),
            "bad token": ask("meta-data/instance-id", X_aws_ec2_metadata_token="x"),
            "no ttl": ask("api/token", "PUT"), "id": get("meta-data/instance-id"), "ip": get("meta-data/local-ipv4"),
            "type": get("meta-data/instance-type"), "zone": get("meta-data/placement/availability-zone"),
            "spot": get("meta-data/spot/instance-action"), "role": get("meta-data/iam/security-credentials/"),
            "public": get("meta-data/public-ipv4"), "document": json.loads(get("dynamic/instance-identity/document")),
            "data": get("user-data"), "list": get("meta-data/")}))
        """,
    )
    assert (found["no token"], found["bad token"], found["no ttl"]) == (401, 401, 400)
    assert (found["id"], found["ip"]) == (nodes.ids[1], nodes.private_ips[1])
    assert (found["type"], found["zone"]) == ("p4d.24xlarge", "us-east-1a")
    assert (found["spot"], found["role"], found["public"]) == (404, 404, 404)
    assert found["document"]["instanceId"] == nodes.ids[1]
    assert found["data"].startswith("#!/bin/bash")
    assert "placement/" in found["list"].splitlines()


def test_another_user_cannot_use_it(nodes: Nodes) -> None:
    """Neither with the key, which he cannot read, nor without."""
    script = f"""
import urllib.request, urllib.error
try: open({str(nodes.home.sandbox / "state.json")!r})
except PermissionError: print("closed")
for path in ("/", "/_sandbox/about", "/?Action=DescribeVpcs&Version=2016-11-15"):
    try: urllib.request.urlopen({nodes.info.settings.endpoint_url!r} + path, timeout=5)
    except urllib.error.HTTPError as error: print(error.code)
"""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if not python:
        pytest.skip("no Python that every user may run")
    as_other = ["setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups"]
    done = subprocess.run([*as_other, python, "-c", script], capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == ["closed", "401", "401", "401"], done.stderr


def test_settings_do_not_change_under_running_instances(nodes: Nodes) -> None:
    assert control.ensure(nodes.home, SandboxSpec(), "ubuntu").pid == nodes.info.pid
    with pytest.raises(UsageError, match="other settings"):
        control.ensure(nodes.home, SandboxSpec(devices_per_node=4), "ubuntu")


def test_shutdown_terminates_the_instance(nodes: Nodes, wait_for: Callable[..., Any]) -> None:
    """The last test of these nodes: root's `shutdown` on node 1."""
    assert nodes.run(1, "/usr/sbin/shutdown now; echo $?").endswith("1")  # not the login user's right
    name = f"ip-{nodes.private_ips[1].replace('.', '-')}"
    mark = control.SandboxFolder(nodes.home.sandbox).id
    found = subprocess.run(["pgrep", "-f", "sleep 1000"], capture_output=True, text=True).stdout.split()
    roots = [Path(f"/proc/{pid}/root/etc") for pid in found]
    marks = [
        ((root / "micsctl-sandbox").read_text().strip(), (root / "hostname").read_text().strip()) for root in roots
    ]
    pid = found[marks.index((mark, name))]
    enter = ["nsenter", "-t", pid, "--mount", "--pid", "--uts", "--net", "--root", "--wd"]
    subprocess.run([*enter, "shutdown", "-h", "now"], timeout=10)
    wait_for(lambda: nodes.state(1) == "terminated")
    gone = nodes.ec2.describe_instances(InstanceIds=[nodes.ids[1]])["Reservations"][0]["Instances"][0]
    assert gone["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    assert "BEGIN SSH HOST KEY" in nodes.ec2.get_console_output(InstanceId=nodes.ids[1])["Output"]
    assert nodes.state(0) == "running"


def namespaces() -> set[str]:
    """Every namespace that some process of this machine is in."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*/ns"):
        for kind in ("net", "mnt", "pid", "uts", "ipc"):
            try:
                found.add(os.readlink(folder / kind))
            except OSError:
                continue
    return found


def interfaces() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith("mics")}


@pytest.mark.parametrize("victim", ["server", "noded"])
def test_nothing_is_left_after_kill(
    victim: str,
    tmp_path: Path,
    running: Callable[..., Any],
    client: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    with running(tmp_path / "home", "netns", SandboxSpec(links="none")) as (home, info):
        nodes = boot(home, info, client, wait_for, tmp_path, 2)
        assert info.link_mbps is None
        busy = nodes.run(0, "setsid sleep 999 >/dev/null 2>&1 </dev/null & echo $!")
        assert busy.isdigit()
        before = control.leftovers(home)
        assert len(before.namespaces) >= 3 * 5  # noded and two nodes
        assert before.interfaces == (f"mics{control.SandboxFolder(home.sandbox).id}",)
        pid = info.pid
        if victim == "noded":
            pid = next(
                int(one.split()[0])
                for one in before.processes
                if "-m micsctl.sandbox.noded" in one and "unshare" not in one
            )
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not control.leftovers(home).processes, 10)
        wait_for(lambda: not control.leftovers(home).interfaces, 10)
        after = control.leftovers(home)
        assert (after.namespaces, after.mounts) == ((), ())
        assert not set(before.namespaces) & namespaces()
        if victim == "server":
            # only the folder is left; the next start sweeps it
            assert after.folders == (str(home.sandbox),)
            again = control.ensure(home, SandboxSpec(links="none"), "ubuntu")
            assert again.pid != info.pid
            assert client(again).describe_instances()["Reservations"] == []


def test_two_sandboxes_side_by_side_and_stop_with_nodes_up(
    nodes: Nodes,
    tmp_path: Path,
    running: Callable[..., Any],
    client: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> None:
    assert nodes.run(0, "true") == ""
    with running(tmp_path / "home", "netns", SandboxSpec(link_mbps=123)) as (home, info):
        assert info.link_mbps == 123
        assert info.settings.vpc_cidr != nodes.info.settings.vpc_cidr
        other = boot(home, info, client, wait_for, tmp_path, 1)
        assert other.run(0, "hostname") != nodes.run(0, "hostname")
        assert len(interfaces()) >= 2
        own = set(control.leftovers(home).namespaces)
        left = control.stop(home)
        assert other.ids[0] in " ".join(left.resources)
        assert (left.processes, left.namespaces, left.mounts, left.interfaces, left.folders) == ((), (), (), (), ())
        assert not own & namespaces()
        assert not home.sandbox.exists()
    assert nodes.run(0, "echo alive") == "alive"


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "sshd" else f"/usr/bin/{name}")
    with pytest.raises(UsageError) as raised:
        control.ensure(Home(tmp_path), SandboxSpec(level="netns"), "ubuntu")
    assert "openssh-server" in raised.value.next
    assert not (tmp_path / "sandbox").exists()


def test_a_server_that_dies_at_its_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(control, "_require_readable_python", lambda: None)
    with pytest.raises(Exception, match="did not start"):
        control.ensure(Home(tmp_path), SandboxSpec(level="netns"), "ubuntu")


@pytest.mark.slow
def test_inside_a_container_with_python_on_a_mount_below_a_closed_folder(tmp_path: Path) -> None:
    """The whole of it with an overlayfs for "/", the virtual environment bind-mounted below a folder of mode 0700."""
    inner = tmp_path / "inner.py"
    inner.write_text(f"""
import importlib.util, os, pathlib, sys, time
spec = importlib.util.spec_from_file_location("helpers", {str(Path(__file__))!r})
helpers = importlib.util.module_from_spec(spec)
sys.modules["helpers"] = helpers
spec.loader.exec_module(helpers)
conf = importlib.util.spec_from_file_location("conf", {str(Path(__file__).with_name("conftest.py"))!r})
conftest = importlib.util.module_from_spec(conf)
conf.loader.exec_module(conftest)
folder = pathlib.Path("/opt/keys")
folder.mkdir(parents=True)
with conftest._running(pathlib.Path("/opt/home"), "netns") as (home, info):
    nodes = helpers.boot(home, info, conftest._client, conftest._wait_for, folder, 1)
    assert sys.prefix.startswith("/closed/"), sys.prefix
    assert nodes.run(0, "stat -fc %T /") == "overlayfs"
    assert nodes.run(0, "/opt/pytorch/bin/python -c 'import moto; print(moto.__file__)'").startswith("/closed/")
assert not pathlib.Path("/opt/home/sandbox").exists()
print("fine")
""")
    outer = tmp_path / "outer.sh"
    outer.write_text(f"""
set -e
mount -t tmpfs layers /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmp tmp
mkdir -p .{CHECKOUT}  # which may lie below /tmp
mount --bind {CHECKOUT} .{CHECKOUT}
cp {inner} tmp/inner.py
mkdir -p closed/venv .old
chmod 700 closed
mount --bind {sys.prefix} closed/venv
pivot_root . .old
cd /
umount -l /.old
[ "$(stat -fc %T /)" = overlayfs ]
exec /closed/venv/bin/python /tmp/inner.py
""")
    container = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL"]
    done = subprocess.run([*container, "sh", outer], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("fine"), done.stdout + done.stderr


def test_pure_parts() -> None:
    assert why_impossible() is None
    assert token_bucket(400) == "rate 400mbit burst 262144 latency 50ms"
    assert token_bucket(10_000).split()[3] == str(10_000 * 1_000_000 // 8 // 200)
    assert overlapping("10.77.0.0/16", ["10.0.0.0/8"])
    assert not overlapping("10.77.0.0/16", ["10.78.0.0/16", "192.168.0.1"])
    assert measured_link_mbps() > 1
