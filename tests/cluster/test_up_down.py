"""`up` and `down` against the emulated EC2, with hosts that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from micsctl.aws.inventory import resources
from micsctl.aws.session import Aws
from micsctl.cluster.down import Down, down
from micsctl.cluster.find import find
from micsctl.cluster.model import Cluster
from micsctl.cluster.status import status
from micsctl.errors import CapacityError, PartialError, PermissionDenied, UsageError
from micsctl.home import ClusterFiles

Up = Callable[..., Cluster]
DownCall = Callable[..., Down]
Kinds = Callable[[], dict[str, int]]

OF_THE_CLUSTER = [{"Name": "tag:micsctl:cluster", "Values": ["demo"]}]


def test_the_whole_life(
    emulator: Any, aws: Aws, files: ClusterFiles, report: Any, kinds: Kinds, bring_up: Up, bring_down: DownCall
) -> None:
    cluster = bring_up()
    assert [node.index for node in cluster.nodes] == [0, 1]
    assert [node.public_ip is not None for node in cluster.nodes] == [True, False]
    assert {node.state for node in cluster.nodes} == {"running"}
    assert (cluster.zone, cluster.instance_type, cluster.ssh_user) == ("us-east-1a", "p4d.24xlarge", "ubuntu")
    assert timedelta(hours=11, minutes=55) < cluster.ends_at - datetime.now(UTC) <= timedelta(hours=12)
    assert files.key.exists()
    everything = {
        "instance": 2,
        "volume": 2,
        "network interface": 10,
        "Elastic IP": 1,
        "placement group": 1,
        "security group": 1,
        "key pair": 1,
        "subnet": 1,
        "internet gateway": 1,
        "VPC": 1,
    }
    assert kinds() == everything
    made = emulator.resources()

    # again: the same cluster, nothing new
    assert bring_up() == cluster
    assert emulator.resources() == made

    # another size, or another laptop
    with pytest.raises(UsageError, match=r"is not what mics\.yaml asks for") as refused:
        bring_up("{nodes: 4}")
    assert "2 x p4d.24xlarge" in refused.value.why
    assert refused.value.costs
    other = ClusterFiles(files.folder.parent / "other laptop")
    with pytest.raises(UsageError, match="does not have the key"):
        bring_up(files=other)
    assert emulator.resources() == made
    assert find(aws, "demo", "sandbox") == cluster
    seen = status(aws, "demo", "sandbox", now=datetime.now(UTC))
    assert seen.cluster == cluster
    assert 0 <= seen.uptime_seconds < 300
    assert 42_900 < seen.seconds_left <= 43_200

    gone = bring_down()
    assert set(gone.instances) == {node.instance_id for node in cluster.nodes}
    assert {resource.kind for resource in gone.removed} >= set(everything) - {"instance", "volume", "network interface"}
    assert emulator.resources() == []
    assert not files.key.exists()
    assert not files.known_hosts.exists()
    assert find(aws, "demo", "sandbox") is None
    assert status(aws, "demo", "sandbox", now=datetime.now(UTC)).cluster is None
    assert bring_down().instances == ()  # gone already is success


def test_another_laptop_can_end_it(
    emulator: Any, aws: Aws, files: ClusterFiles, report: Any, bring_up: Up, bring_down: DownCall
) -> None:
    bring_up()
    other = ClusterFiles(files.folder.parent / "other laptop")
    assert len(down(aws, "demo", other, report=report).instances) == 2
    assert emulator.resources() == []
    # this laptop's key, host keys and journal are of machines that are gone; a new cluster is made all the same
    assert len(bring_up().nodes) == 2
    bring_down()


def test_the_network_is_right_for_efa_and_open_to_the_caller_only(
    emulator: Any, aws: Aws, bring_up: Up, bring_down: DownCall
) -> None:
    cluster = bring_up()
    group = aws.ec2.describe_security_groups(Filters=OF_THE_CLUSTER)["SecurityGroups"][0]
    for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
        assert any(
            rule["IpProtocol"] == "-1" and [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group["GroupId"]]
            for rule in rules
        )
    assert _ssh_rules(aws) == [(22, 22, "203.0.113.7/32")]
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

    moved = replace(aws, settings=replace(aws.settings, caller_cidr="198.51.100.9/32"))
    bring_up(aws=moved)
    assert _ssh_rules(aws) == [(22, 22, "198.51.100.9/32")]
    bring_down()


def _ssh_rules(aws: Aws) -> list[tuple[int, int, str]]:
    [group] = aws.ec2.describe_security_groups(Filters=OF_THE_CLUSTER)["SecurityGroups"]
    return [
        (rule["FromPort"], rule["ToPort"], block["CidrIp"])
        for rule in group["IpPermissions"]
        for block in rule["IpRanges"]
    ]


def test_a_zone_without_capacity_falls_to_the_next(
    emulator: Any, kinds: Kinds, bring_up: Up, bring_down: DownCall
) -> None:
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1a")
    assert bring_up().zone == "us-east-1b"
    assert kinds()["instance"] == 2
    assert kinds()["placement group"] == 1
    bring_down()


def test_no_capacity_anywhere_leaves_nothing(emulator: Any, bring_up: Up) -> None:
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1a")
    emulator.fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1d")
    with pytest.raises(CapacityError, match=r"no p4d\.24xlarge capacity in 3 of 3 zones") as refused:
        bring_up("{zones: [us-east-1a, us-east-1f, us-east-1d]}")
    first, second, third, *words = refused.value.why.splitlines()
    assert first.split()[:2] == ["us-east-1a", "InsufficientInstanceCapacity"]
    assert second == "us-east-1f  not offered here"
    assert third.split()[:2] == ["us-east-1d", "InsufficientInstanceCapacity"]
    assert "sufficient p4d.24xlarge capacity" in "\n".join(words)
    assert refused.value.costs == "nothing is running; nothing costs money"
    assert emulator.resources() == []


def test_a_quota_stops_at_the_first_zone_and_leaves_nothing(emulator: Any, files: ClusterFiles, bring_up: Up) -> None:
    emulator.fault("RunInstances", "VcpuLimitExceeded")
    with pytest.raises(PermissionDenied) as refused:
        bring_up()
    assert "VcpuLimitExceeded" in refused.value.why
    assert "nothing costs money" in refused.value.costs
    assert emulator.resources() == []
    assert files.journal.read_text().count('"RunInstances"') == 1


@pytest.mark.parametrize(
    ("action", "code"),
    [
        ("CreateInternetGateway", "UnauthorizedOperation"),
        ("AllocateAddress", "AddressLimitExceeded"),
        ("CreatePlacementGroup", "UnauthorizedOperation"),
    ],
)
def test_a_failure_before_the_machines_is_rolled_back(
    emulator: Any, files: ClusterFiles, bring_up: Up, action: str, code: str
) -> None:
    emulator.fault(action, code)
    with pytest.raises(PermissionDenied):
        bring_up()
    assert emulator.resources() == []
    assert '"RunInstances"' not in files.journal.read_text()


def test_wrong_wishes_create_nothing(emulator: Any, bring_up: Up) -> None:
    wishes = [
        "{type: p9.huge}",
        "{image: ami-00000000000000000}",
        "{image: /no/such/parameter}",
        "{subnet: subnet-00000000}",
    ]
    for wish in wishes:
        with pytest.raises(UsageError) as refused:
            bring_up(wish)
        assert refused.value.next
    assert emulator.resources() == []


def test_a_subnet_of_the_users_is_used_and_kept(
    emulator: Any, aws: Aws, kinds: Kinds, bring_up: Up, bring_down: DownCall
) -> None:
    vpc_id = aws.ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    answer = aws.ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.77.128.0/20", AvailabilityZone="us-east-1c")
    subnet_id = answer["Subnet"]["SubnetId"]
    gateway_id = aws.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    try:
        with pytest.raises(UsageError, match="cannot be reached"):
            bring_up(f"{{subnet: {subnet_id}}}")
        aws.ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
        before = emulator.resources()
        with pytest.raises(UsageError, match=r"not in cluster\.zones"):
            bring_up(f"{{subnet: {subnet_id}, zones: [us-east-1a]}}")
        cluster = bring_up(f"{{subnet: {subnet_id}, nodes: 2}}")
        assert cluster.zone == "us-east-1c"
        assert "VPC" not in kinds()
        bring_down()
        assert emulator.resources() == before
    finally:
        aws.ec2.detach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
        aws.ec2.delete_internet_gateway(InternetGatewayId=gateway_id)
        aws.ec2.delete_subnet(SubnetId=subnet_id)
        aws.ec2.delete_vpc(VpcId=vpc_id)


def test_a_single_node_of_a_type_without_efa(emulator: Any, kinds: Kinds, bring_up: Up, bring_down: DownCall) -> None:
    assert len(bring_up("{type: t3.large, nodes: 1}").nodes) == 1
    assert kinds()["network interface"] == 1
    assert "placement group" not in kinds()
    bring_down()


def test_down_lists_what_it_could_not_remove(
    emulator: Any, aws: Aws, files: ClusterFiles, kinds: Kinds, bring_up: Up, bring_down: DownCall
) -> None:
    """A foreign interface holds the security group, as a mounted file system would."""
    bring_up()
    network = {one.kind: one.id for one in resources(aws, "demo")}
    interface = aws.ec2.create_network_interface(
        SubnetId=network["subnet"], Groups=[network["security group"]], Description="EFS mount target"
    )["NetworkInterface"]["NetworkInterfaceId"]
    with pytest.raises(PartialError) as failed:
        bring_down(limit_seconds=1.5)
    assert f"{interface} (EFS mount target" in failed.value.why
    assert network["security group"] in failed.value.costs
    assert "instance" not in kinds()  # what costs money is gone
    assert files.key.exists()
    aws.ec2.delete_network_interface(NetworkInterfaceId=interface)
    bring_down()
    assert emulator.resources() == []
