"""`up` and `down` against the emulated EC2, with hosts that only pretend."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from micsctl.aws.inventory import resources
from micsctl.aws.session import Aws
from micsctl.cluster.down import down
from micsctl.cluster.extend import extend, read_ends_at
from micsctl.cluster.find import find
from micsctl.cluster.journal import Journal, launched_ids, open_launch
from micsctl.cluster.model import Cluster
from micsctl.cluster.status import status
from micsctl.cluster.up import up
from micsctl.errors import (
    CapacityError,
    Interrupted,
    PartialError,
    PermissionDenied,
    UsageError,
)
from micsctl.home import ClusterFiles
from micsctl.remote.host import Host, HostError, HostKeyError
from micsctl.spec import Spec, parse

SPEC = parse("{name: demo, provider: sandbox, cluster: {nodes: 3}}")


def kinds(aws: Aws) -> dict[str, int]:
    found = [resource.kind for resource in resources(aws, "demo")]
    return {kind: found.count(kind) for kind in found}


@pytest.fixture
def bring_up(aws: Aws, files: ClusterFiles, report: Any, open_hosts: Any) -> Any:
    def call(spec: Spec = SPEC, **more: Any) -> Cluster:
        return up(aws, spec, files, **({"report": report, "open_hosts": open_hosts} | more))

    return call


@pytest.fixture
def bring_down(aws: Aws, files: ClusterFiles, report: Any) -> Any:
    return lambda **more: down(aws, "demo", files, report=report, **more)


def test_the_whole_life(
    emulator: Any, aws: Aws, files: ClusterFiles, report: Any, bring_up: Any, bring_down: Any
) -> None:
    cluster = bring_up()
    assert [node.index for node in cluster.nodes] == [0, 1, 2]
    assert [node.public_ip is not None for node in cluster.nodes] == [True, False, False]
    assert {node.state for node in cluster.nodes} == {"running"}
    assert (cluster.zone, cluster.instance_type, cluster.ssh_user) == ("us-east-1a", "p4d.24xlarge", "ubuntu")
    assert timedelta(hours=11, minutes=59) < cluster.ends_at - datetime.now(UTC) <= timedelta(hours=12)
    assert files.key.exists()

    everything = {
        "instance": 3,
        "volume": 3,
        "network interface": 15,
        "Elastic IP": 1,
        "placement group": 1,
        "security group": 1,
        "key pair": 1,
        "subnet": 1,
        "internet gateway": 1,
        "VPC": 1,
    }
    assert kinds(aws) == everything
    made = emulator.resources()

    # again: the same cluster, nothing new
    assert bring_up() == cluster
    assert emulator.resources() == made

    # another laptop sees it too, and may not use it
    assert find(aws, "demo", "sandbox") == cluster
    other = ClusterFiles(files.folder.parent / "other laptop")
    with pytest.raises(UsageError, match="does not have the key") as refused:
        up(aws, SPEC, other, report=report, open_hosts=None)  # type: ignore[arg-type]
    assert refused.value.costs
    seen = status(aws, "demo", "sandbox", now=datetime.now(UTC))
    assert seen.cluster == cluster
    assert 0 <= seen.uptime_seconds < 60
    assert 43_000 < seen.seconds_left <= 43_200

    gone = bring_down()
    assert set(gone.instances) == {node.instance_id for node in cluster.nodes}
    assert {resource.kind for resource in gone.removed} >= set(everything) - {"instance", "volume", "network interface"}
    assert emulator.resources() == []
    assert resources(aws, "demo") == []
    assert not files.key.exists()
    assert not files.known_hosts.exists()
    assert find(aws, "demo", "sandbox") is None
    assert status(aws, "demo", "sandbox", now=datetime.now(UTC)).cluster is None

    assert bring_down().instances == ()  # gone already is success


def test_another_laptop_can_end_it(emulator: Any, aws: Aws, files: ClusterFiles, report: Any, bring_up: Any) -> None:
    bring_up()
    other = ClusterFiles(files.folder.parent / "other laptop")
    assert len(down(aws, "demo", other, report=report).instances) == 3
    assert emulator.resources() == []
    # the first laptop's key and host keys are of the old machines; a new cluster is made all the same
    assert len(bring_up().nodes) == 3
    down(aws, "demo", files, report=report)


def test_the_network_is_right_for_efa(aws: Aws, bring_up: Any, bring_down: Any) -> None:
    cluster = bring_up()
    group = aws.ec2.describe_security_groups(Filters=specification_filter())["SecurityGroups"][0]
    itself = group["GroupId"]
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        assert any(
            rule["IpProtocol"] == "-1" and [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [itself]
            for rule in rules
        )
    ssh = [rule for rule in group["IpPermissions"] if rule["IpProtocol"] == "tcp"]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in ssh] == [(22, 22)]
    assert [block["CidrIp"] for rule in ssh for block in rule["IpRanges"]] == ["203.0.113.7/32"]
    [raw] = aws.ec2.describe_instances(InstanceIds=[cluster.head.instance_id])["Reservations"][0]["Instances"]
    places = sorted(
        (one["Attachment"]["NetworkCardIndex"], one["Attachment"]["DeviceIndex"], one["InterfaceType"])
        for one in raw["NetworkInterfaces"]
    )
    assert places == [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in (1, 2, 3))]
    assert raw["MetadataOptions"]["HttpTokens"] == "required"
    assert raw["Placement"]["GroupName"] == "micsctl-demo-us-east-1a"
    tags = {tag["Key"]: tag["Value"] for tag in raw["Tags"]}
    assert tags["micsctl:cluster"] == "demo"
    assert tags["micsctl:index"] == "0"
    assert tags["micsctl:ends-at"] == str(int(cluster.ends_at.timestamp()))
    bring_down()


def specification_filter() -> list[dict[str, Any]]:
    return [{"Name": "tag:micsctl:cluster", "Values": ["demo"]}]


def test_ssh_follows_the_callers_address(
    aws: Aws, files: ClusterFiles, report: Any, bring_up: Any, open_hosts: Any
) -> None:
    from dataclasses import replace

    bring_up()
    moved = replace(aws, settings=replace(aws.settings, caller_cidr="198.51.100.9/32"))
    up(moved, SPEC, files, report=report, open_hosts=open_hosts)
    [group] = aws.ec2.describe_security_groups(Filters=specification_filter())["SecurityGroups"]
    blocks = [block["CidrIp"] for rule in group["IpPermissions"] for block in rule["IpRanges"]]
    assert blocks == ["198.51.100.9/32"]
    down(aws, "demo", files, report=report)


def test_a_zone_without_capacity_falls_to_the_next(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1a")
    cluster = bring_up()
    assert cluster.zone == "us-east-1b"
    assert kinds(aws)["instance"] == 3
    assert kinds(aws)["placement group"] == 1
    bring_down()


def test_no_capacity_anywhere_leaves_nothing(emulator: Any, bring_up: Any) -> None:
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1a")
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1d")
    spec = parse("{name: demo, provider: sandbox, cluster: {zones: [us-east-1a, us-east-1f, us-east-1d]}}")
    with pytest.raises(CapacityError, match=r"no p4d\.24xlarge capacity in 3 of 3 zones") as refused:
        bring_up(spec)
    first, second, third, *words = refused.value.why.splitlines()
    assert first.split()[:2] == ["us-east-1a", "InsufficientInstanceCapacity"]
    assert second == "us-east-1f  not offered here"
    assert third.split()[:2] == ["us-east-1d", "InsufficientInstanceCapacity"]
    assert "sufficient p4d.24xlarge capacity" in "\n".join(words)
    assert refused.value.costs == "nothing is running; nothing costs money"
    assert emulator.resources() == []


def test_a_quota_stops_at_the_first_zone_and_leaves_nothing(emulator: Any, files: ClusterFiles, bring_up: Any) -> None:
    emulator.fault("RunInstances", "VcpuLimitExceeded")
    with pytest.raises(PermissionDenied) as refused:
        bring_up()
    assert "VcpuLimitExceeded" in refused.value.why
    assert "nothing costs money" in refused.value.costs
    assert emulator.resources() == []
    assert files.journal.read_text().count("RunInstances") == 1


def test_no_elastic_ip_left_is_found_before_machines_are_started(
    emulator: Any, files: ClusterFiles, bring_up: Any
) -> None:
    emulator.fault("AllocateAddress", "AddressLimitExceeded")
    with pytest.raises(PermissionDenied):
        bring_up()
    assert "RunInstances" not in files.journal.read_text()
    assert emulator.resources() == []


@pytest.mark.parametrize(
    "action", ["CreateVpc", "CreateSubnet", "CreateSecurityGroup", "CreatePlacementGroup", "ImportKeyPair"]
)
def test_a_failure_before_the_machines_is_rolled_back(emulator: Any, bring_up: Any, action: str) -> None:
    emulator.fault(action, "UnauthorizedOperation")
    with pytest.raises(PermissionDenied):
        bring_up()
    assert emulator.resources() == []


def test_wrong_wishes_create_nothing(emulator: Any, bring_up: Any) -> None:
    for wish in (
        "type: p9.huge",
        "image: ami-00000000000000000",
        "image: /no/such/parameter",
        "subnet: subnet-00000000",
        "{type: p3dn.24xlarge, region: us-east-1, image: ami-0}",
    ):
        text = wish if wish.startswith("{") else f"{{{wish}}}"
        with pytest.raises(UsageError) as refused:
            bring_up(parse(f"{{name: demo, cluster: {text}}}"))
        assert refused.value.next
    assert emulator.resources() == []


def test_another_size_is_refused(aws: Aws, bring_up: Any, bring_down: Any) -> None:
    bring_up()
    with pytest.raises(UsageError, match=r"is not what mics\.yaml asks for") as refused:
        bring_up(parse("{name: demo, cluster: {nodes: 4}}"))
    assert "3 x p4d.24xlarge" in refused.value.why
    assert refused.value.costs
    assert kinds(aws)["instance"] == 3
    bring_down()


def test_a_subnet_of_the_users_is_used_and_kept(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    vpc_id = aws.ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    answer = aws.ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.77.128.0/20", AvailabilityZone="us-east-1c")
    subnet_id = answer["Subnet"]["SubnetId"]
    before = emulator.resources()
    cluster = bring_up(parse(f"{{name: demo, cluster: {{subnet: {subnet_id}, nodes: 2}}}}"))
    assert cluster.zone == "us-east-1c"
    assert "VPC" not in kinds(aws)
    bring_down()
    assert emulator.resources() == before
    aws.ec2.delete_subnet(SubnetId=subnet_id)
    aws.ec2.delete_vpc(VpcId=vpc_id)


def test_a_single_node_of_a_type_without_efa(aws: Aws, bring_up: Any, bring_down: Any) -> None:
    cluster = bring_up(parse("{name: demo, cluster: {type: t3.large, nodes: 1}}"))
    assert len(cluster.nodes) == 1
    assert kinds(aws)["network interface"] == 1
    assert "placement group" not in kinds(aws)
    bring_down()


# --- answers that get lost, machines that are slow to appear


def test_a_lost_answer_does_not_make_a_second_set(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    dropped = drop_answers(aws, times=1)
    assert len(bring_up().nodes) == 3
    assert dropped == [True]
    assert kinds(aws)["instance"] == 3
    bring_down()


def test_up_again_after_a_crash_goes_on_with_the_machines(
    emulator: Any, aws: Aws, files: ClusterFiles, bring_up: Any, bring_down: Any
) -> None:
    """The laptop dies between the request and its record, while AWS does not show the machines yet."""
    emulator.fault("RunInstances", "DelayedVisibility", seconds=1.5, times=1)
    crash_after_launch(aws)
    with pytest.raises(SystemError):
        bring_up()
    lost = open_launch(Journal(files.journal).read())
    assert lost
    again = bring_up()
    assert len(again.nodes) == 3
    assert kinds(aws)["instance"] == 3
    assert int(again.ends_at.timestamp()) == lost.ends_at
    bring_down()
    assert emulator.resources() == []


def test_down_after_a_crash_waits_for_machines_that_may_still_appear(
    emulator: Any, aws: Aws, files: ClusterFiles, bring_up: Any, bring_down: Any
) -> None:
    emulator.fault("RunInstances", "DelayedVisibility", seconds=1.5, times=1)
    crash_after_launch(aws)
    with pytest.raises(SystemError):
        bring_up()
    assert len(bring_down().instances) == 3
    assert emulator.resources() == []


def test_machines_that_show_up_late_are_waited_for(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    emulator.fault("RunInstances", "DelayedVisibility", seconds=0.5, times=1)
    assert len(bring_up().nodes) == 3
    bring_down()


def test_throttling_is_survived(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    emulator.fault("RunInstances", "RequestLimitExceeded", times=2)
    assert len(bring_up().nodes) == 3
    bring_down()


def drop_answers(aws: Aws, times: int) -> list[bool]:
    """The machines start, the answer never arrives."""
    from botocore.exceptions import ReadTimeoutError

    real, dropped = aws.launcher.run_instances, list[bool]()

    def run_instances(**parameters: Any) -> Any:
        answer = real(**parameters)
        if len(dropped) < times:
            dropped.append(True)
            raise ReadTimeoutError(endpoint_url="https://ec2")
        return answer

    aws.launcher.run_instances = run_instances
    return dropped


def crash_after_launch(aws: Aws) -> None:
    real = aws.launcher.run_instances

    def run_instances(**parameters: Any) -> Any:
        real(**parameters)
        aws.launcher.run_instances = real
        raise SystemError("the laptop died")

    aws.launcher.run_instances = run_instances


# --- failures with machines


def test_a_node_that_never_gets_ready_is_a_partial_failure(
    emulator: Any, aws: Aws, files: ClusterFiles, bring_up: Any, bring_down: Any, open_hosts_with: Any
) -> None:
    broken = {1: {".micsctl/ready": "installing torch 2.13.0 failed (exit 1): no network\n"}}
    with pytest.raises(PartialError, match="the bootstrap failed on 1 of 3 nodes") as failed:
        bring_up(open_hosts=open_hosts_with(broken))
    assert "node 1: failed: installing torch 2.13.0 failed (exit 1): no network" in failed.value.why
    assert "3 instances: " in failed.value.costs
    assert "1 Elastic IP: " in failed.value.costs
    assert "end by themselves at" in failed.value.costs
    assert "micsctl down -n demo" in failed.value.next
    assert len(bring_up().nodes) == 3  # repaired meanwhile: up goes on
    bring_down()


def test_the_deadline_names_each_node_and_its_state(bring_up: Any, bring_down: Any, open_hosts_with: Any) -> None:
    broken = {
        0: {".micsctl/ready": None},
        2: {".micsctl/ready": HostError("cannot reach node 2", "connection refused", transient=True)},
    }
    with pytest.raises(PartialError, match="2 of 3 nodes did not become ready in time") as failed:
        bring_up(open_hosts=open_hosts_with(broken), ready_seconds=0.2)
    assert "node 0: bootstrap: installing torch" in failed.value.why
    assert "node 2: port: connection refused" in failed.value.why
    bring_down()


def test_a_changed_host_key_stops_at_once(bring_up: Any, bring_down: Any, open_hosts_with: Any) -> None:
    broken = {1: {".micsctl/ready": HostKeyError("node 1 shows another host key")}}
    with pytest.raises(PartialError, match="another host key"):
        bring_up(open_hosts=open_hosts_with(broken))
    bring_down()


def test_a_node_that_ends_while_waiting_is_named(
    emulator: Any, aws: Aws, bring_up: Any, bring_down: Any, open_hosts_with: Any
) -> None:
    def end_one() -> None:
        emulator.end(next(one.id for one in resources(aws, "demo") if one.kind == "instance"))

    timer = threading.Timer(1.0, end_one)
    timer.start()
    with pytest.raises(PartialError, match="1 nodes ended") as failed:
        bring_up(open_hosts=open_hosts_with({0: {".micsctl/ready": None}}), ready_seconds=30)
    timer.join()
    assert "Client.InstanceInitiatedShutdown" in failed.value.why
    assert "2 instances: " in failed.value.costs
    bring_down()


def test_ctrl_c_says_what_exists(emulator: Any, aws: Aws, bring_up: Any, bring_down: Any) -> None:
    @contextmanager
    def interrupted(cluster: Cluster, files: ClusterFiles) -> Iterator[Sequence[Host]]:
        raise KeyboardInterrupt
        yield []

    with pytest.raises(Interrupted) as stopped:
        bring_up(open_hosts=interrupted)
    assert "3 instances: " in stopped.value.costs
    assert "micsctl down -n demo" in stopped.value.next
    assert kinds(aws)["instance"] == 3
    bring_down()


def test_ctrl_c_while_machines_are_started_waits_for_the_answer(
    emulator: Any, aws: Aws, files: ClusterFiles, bring_up: Any, bring_down: Any
) -> None:
    real = aws.launcher.run_instances

    def run_instances(**parameters: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return real(**parameters)

    aws.launcher.run_instances = run_instances
    with pytest.raises(Interrupted) as stopped:
        bring_up()
    assert "3 instances: " in stopped.value.costs
    assert len(launched_ids(Journal(files.journal).read())) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    bring_down()


def test_ctrl_c_before_machines_rolls_back(emulator: Any, aws: Aws, bring_up: Any) -> None:
    def interrupted(**parameters: Any) -> Any:
        raise KeyboardInterrupt

    aws.ec2.allocate_address = interrupted
    with pytest.raises(Interrupted) as stopped:
        bring_up()
    assert stopped.value.costs == "nothing is running; nothing costs money"
    assert emulator.resources() == []


def test_down_lists_what_it_could_not_remove(
    emulator: Any, aws: Aws, files: ClusterFiles, bring_up: Any, bring_down: Any
) -> None:
    """A foreign interface holds the security group, as a mounted file system would."""
    bring_up()
    network = {one.kind: one.id for one in resources(aws, "demo")}
    interface = aws.ec2.create_network_interface(
        SubnetId=network["subnet"], Groups=[network["security group"]], Description="EFS mount target"
    )["NetworkInterface"]["NetworkInterfaceId"]
    with pytest.raises(PartialError) as failed:
        bring_down(limit_seconds=3)
    assert f"{interface} (EFS mount target" in failed.value.why
    assert network["security group"] in failed.value.costs
    assert "instance" not in kinds(aws)  # what costs money is gone
    assert files.key.exists()
    aws.ec2.delete_network_interface(NetworkInterfaceId=interface)
    bring_down()
    assert emulator.resources() == []


def test_extend_moves_every_end(fake_host: Any) -> None:
    planned = datetime(2030, 1, 1, tzinfo=UTC)
    later = planned + timedelta(hours=2)
    hosts = [fake_host(0), fake_host(1, {".micsctl/ends_at": f"{int(later.timestamp())}\n"}), fake_host(2)]
    hosts[2].files[".micsctl/ends_at"] = "rubbish"
    assert read_ends_at(hosts) == [None, later, None]
    end = extend(hosts, timedelta(hours=4), planned=planned)
    assert end == later + timedelta(hours=4)
    assert read_ends_at(hosts) == [end] * 3
    fresh = [fake_host(0)]
    assert extend(fresh, timedelta(hours=4), planned=planned) == planned + timedelta(hours=4)
