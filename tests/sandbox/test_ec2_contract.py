"""The emulated EC2 without hosts, through boto3: what moto lacks or loses, so that another moto fails loudly."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from micsctl.home import Home
from micsctl.sandbox import control
from micsctl.sandbox.control import SandboxInfo
from micsctl.sandbox.faults import Fault

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBeQxXoVMPSPRrKeeBkqmjPvyfYyIrKFRIlfBNpKQjCf someone@example"
TYPE = "p4d.24xlarge"
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-{}/latest/ami-id"
EFA = [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa"), (2, 0, "efa"), (3, 0, "efa-only")]
Sandbox = tuple[Home, SandboxInfo]


@pytest.fixture
def ec2(hostless: Sandbox, client: Callable[..., Any]) -> Iterator[Any]:
    made = client(hostless[1])
    yield made
    control.clear_faults(hostless[0])
    wipe(made)
    assert control.leftovers(hostless[0]).resources == ()


@pytest.fixture
def image(hostless: Sandbox, client: Callable[..., Any]) -> str:
    return str(client(hostless[1], "ssm").get_parameter(Name=IMAGE.format("22.04"))["Parameter"]["Value"])


class Network:
    """A VPC with a way out, a subnet and a security group, made as `up` makes them."""

    def __init__(self, ec2: Any, cidr: str = "10.20.0.0/16", zone: str = "us-east-1a") -> None:
        self.vpc = ec2.create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
        self.gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=self.gateway, VpcId=self.vpc)
        tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [self.vpc]}])["RouteTables"]
        self.table = tables[0]["RouteTableId"]
        ec2.create_route(RouteTableId=self.table, DestinationCidrBlock="0.0.0.0/0", GatewayId=self.gateway)
        block = cidr.replace(".0.0/16", ".16.0/20")
        self.subnet = ec2.create_subnet(VpcId=self.vpc, CidrBlock=block, AvailabilityZone=zone)["Subnet"]["SubnetId"]
        self.group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=self.vpc)["GroupId"]
        ec2.authorize_security_group_ingress(
            GroupId=self.group, IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": self.group}]}]
        )

    def interfaces(self, places: list[tuple[int, int, str]] = EFA) -> list[dict[str, Any]]:
        return [
            {
                "NetworkCardIndex": card,
                "DeviceIndex": device,
                "InterfaceType": kind,
                "SubnetId": self.subnet,
                "Groups": [self.group],
                "DeleteOnTermination": True,
            }
            for card, device, kind in places
        ]


def wipe(ec2: Any) -> None:
    """Delete everything, in the only order that works."""
    ids = [i["InstanceId"] for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
    if ids:
        ec2.terminate_instances(InstanceIds=ids)
        waiter = ec2.get_waiter("instance_terminated")
        waiter.config.delay = 0.1
        waiter.wait(InstanceIds=ids)
    for address in ec2.describe_addresses()["Addresses"]:
        if address.get("AssociationId"):
            ec2.disassociate_address(AssociationId=address["AssociationId"])
        ec2.release_address(AllocationId=address["AllocationId"])
    for group in ec2.describe_placement_groups()["PlacementGroups"]:
        ec2.delete_placement_group(GroupName=group["GroupName"])
    for pair in ec2.describe_key_pairs()["KeyPairs"]:
        ec2.delete_key_pair(KeyName=pair["KeyName"])
    for vpc in ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["false"]}])["Vpcs"]:
        of_vpc = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
        groups = [
            g for g in ec2.describe_security_groups(Filters=of_vpc)["SecurityGroups"] if g["GroupName"] != "default"
        ]
        for group in groups:
            for rule in group["IpPermissions"]:
                ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
        for group in groups:
            ec2.delete_security_group(GroupId=group["GroupId"])
        for subnet in ec2.describe_subnets(Filters=of_vpc)["Subnets"]:
            ec2.delete_subnet(SubnetId=subnet["SubnetId"])
        attached = [{"Name": "attachment.vpc-id", "Values": [vpc["VpcId"]]}]
        for gateway in ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]:
            ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc["VpcId"])
            ec2.delete_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"])
        ec2.delete_vpc(VpcId=vpc["VpcId"])


BROKEN_HOSTS = """
import sys, threading, boto3
from werkzeug.serving import make_server
from micsctl.sandbox.ec2.install import install
from micsctl.sandbox.fake import FakeHosts
from micsctl.sandbox.faults import FaultBook

class Broken(FakeHosts):
    def start(self, requests, on_running, on_ended):
        raise OSError("No space left on device")

_, application = install(Broken(), FaultBook())
server = make_server("127.0.0.1", 0, application, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
key = dict(region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
ec2, ssm = (boto3.client(name, endpoint_url=f"http://127.0.0.1:{server.port}", **key) for name in ("ec2", "ssm"))
image = ssm.get_parameter(Name=sys.argv[1])["Parameter"]["Value"]
ec2.run_instances(ImageId=image, InstanceType="p4d.24xlarge", MinCount=2, MaxCount=2)
for instance in ec2.describe_instances()["Reservations"][0]["Instances"]:
    print(instance["State"]["Name"], instance["StateReason"]["Code"])
"""


def test_instances_whose_hosts_cannot_start_end_at_once() -> None:
    """In a process of its own: moto can be extended once in a process only."""
    command = [sys.executable, "-c", BROKEN_HOSTS, IMAGE.format("24.04")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.stdout.splitlines() == ["terminated Server.InternalError"] * 2, answer.stderr[-2000:]
    assert "No space left" in answer.stderr


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[str, int]:
    """Error code and HTTP status."""
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    response = raised.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def launch(ec2: Any, image: str, network: Network, **more: Any) -> list[dict[str, Any]]:
    request = {
        "ImageId": image,
        "InstanceType": TYPE,
        "MinCount": 1,
        "MaxCount": 1,
        "NetworkInterfaces": network.interfaces(),
        **more,
    }
    return list(ec2.run_instances(**request)["Instances"])


def describe(ec2: Any, ids: list[str]) -> list[dict[str, Any]]:
    found = ec2.describe_instances(InstanceIds=ids)["Reservations"]
    return sorted((i for r in found for i in r["Instances"]), key=lambda i: int(i["AmiLaunchIndex"]))


def wait_running(ec2: Any, ids: list[str]) -> None:
    waiter = ec2.get_waiter("instance_running")
    waiter.config.delay = 0.1
    waiter.wait(InstanceIds=ids)


def test_launch_keeps_everything(ec2: Any, image: str) -> None:
    network = Network(ec2)
    ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=PUBLIC_KEY.encode())
    ec2.create_placement_group(GroupName="together", Strategy="cluster")
    tags = [
        {"ResourceType": kind, "Tags": [{"Key": "micsctl:cluster", "Value": "demo"}]}
        for kind in ("instance", "volume", "network-interface")
    ]
    launched = launch(
        ec2,
        image,
        network,
        MinCount=2,
        MaxCount=3,
        KeyName="mine",
        Placement={"GroupName": "together"},
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"HttpTokens": "required", "HttpEndpoint": "enabled"},
        TagSpecifications=tags,
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "DeleteOnTermination": True}}],
        UserData="#!/bin/sh\ntrue\n",
    )
    assert [one["State"]["Name"] for one in launched] == ["pending"] * 3
    ids = [one["InstanceId"] for one in launched]
    wait_running(ec2, ids)
    instances = describe(ec2, ids)
    for instance in instances:
        kinds = [
            (n["Attachment"]["NetworkCardIndex"], n["Attachment"]["DeviceIndex"], n["InterfaceType"])
            for n in instance["NetworkInterfaces"]
        ]
        assert kinds == EFA
        assert instance["Placement"]["GroupName"] == "together"
        assert instance["MetadataOptions"]["HttpTokens"] == "required"
        assert "PublicIpAddress" not in instance
        assert {"Key": "micsctl:cluster", "Value": "demo"} in instance["Tags"]
        behaviour = ec2.describe_instance_attribute(
            InstanceId=instance["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert behaviour["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        assert not [
            n for n in instance["NetworkInterfaces"] if n["InterfaceType"] == "efa-only" and "PrivateIpAddress" in n
        ]
    addresses = [
        a["PrivateIpAddress"]
        for i in instances
        for n in i["NetworkInterfaces"]
        for a in n.get("PrivateIpAddresses", [])
    ]
    assert len(addresses) == len(set(addresses)) == 3 * 3
    tagged = [{"Name": "tag:micsctl:cluster", "Values": ["demo"]}]
    assert len(ec2.describe_network_interfaces(Filters=tagged)["NetworkInterfaces"]) == 3 * len(EFA)
    assert len(ec2.describe_volumes(Filters=tagged)["Volumes"]) == 3
    by_group = [{"Name": "placement-group-name", "Values": ["together"]}]
    assert len(ec2.describe_instances(Filters=by_group)["Reservations"][0]["Instances"]) == 3


def test_two_clusters_with_the_same_blocks_get_different_addresses(ec2: Any, image: str) -> None:
    first, second = (launch(ec2, image, Network(ec2), MaxCount=2) for _ in range(2))
    assert len({one["PrivateIpAddress"] for one in [*first, *second]}) == 4


def test_client_token_makes_a_launch_idempotent(ec2: Any, image: str) -> None:
    network, token = Network(ec2), str(uuid.uuid4())
    first = launch(ec2, image, network, ClientToken=token)
    assert [one["InstanceId"] for one in launch(ec2, image, network, ClientToken=token)] == [first[0]["InstanceId"]]
    assert refused(lambda: launch(ec2, image, network, ClientToken=token, MaxCount=2)) == (
        "IdempotentParameterMismatch",
        400,
    )
    by_token = [{"Name": "client-token", "Values": [token]}]
    assert len(ec2.describe_instances(Filters=by_token)["Reservations"]) == 1


def test_dry_run_launches_nothing(ec2: Any, image: str) -> None:
    network = Network(ec2)
    assert refused(lambda: launch(ec2, image, network, DryRun=True))[0] == "DryRunOperation"
    assert ec2.describe_instances()["Reservations"] == [] or all(
        i["State"]["Name"] == "terminated" for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"ImageId": "ami-0123456789abcdef0"}, "InvalidAMIID.NotFound"),
        ({"InstanceType": "p99.huge"}, "InvalidInstanceType"),
        ({"KeyName": "nobodys"}, "InvalidKeyPair.NotFound"),
        ({"Placement": {"GroupName": "nowhere"}}, "InvalidPlacementGroup.Unknown"),
        ({"MinCount": 2, "MaxCount": 1}, "InvalidParameterValue"),
        ({"UserData": "#!/bin/sh\n" + "x" * 16384}, "InvalidParameterValue"),
        ({"IamInstanceProfile": {"Name": "nobodys"}}, "InvalidParameterValue"),
        ({"IamInstanceProfile": {"Arn": "arn:aws:iam::123456789012:instance-profile/x"}}, "InvalidParameterValue"),
        ({"MaxCount": 5000, "MinCount": 5000}, "InsufficientFreeAddressesInSubnet"),
    ],
)
def test_bad_launches_are_refused(ec2: Any, image: str, change: dict[str, Any], code: str) -> None:
    network = Network(ec2)
    assert refused(lambda: launch(ec2, image, network, **change)) == (code, 400)


def test_bad_interfaces_are_refused(ec2: Any, image: str) -> None:
    network = Network(ec2)

    def attempt(places: list[tuple[int, int, str]], **more: Any) -> str:
        interfaces = network.interfaces(places)
        interfaces[0] |= more
        return refused(lambda: launch(ec2, image, network, NetworkInterfaces=interfaces))[0]

    assert attempt([(0, 0, "efa"), (4, 0, "efa")]) == "InvalidParameterValue"
    assert attempt([(0, 0, "efa"), (0, 0, "efa")]) == "InvalidParameterValue"
    assert attempt([(card, device, "efa") for card in range(4) for device in (0, 1)]) == "AttachmentLimitExceeded"
    assert attempt([(0, 0, "efa-only"), (0, 1, "interface")]) == "InvalidParameterCombination"
    assert attempt([(0, 0, "efa"), (1, 1, "efa")], AssociatePublicIpAddress=True) == "InvalidParameterCombination"
    assert attempt([(0, 0, "efa")], Groups=["sg-0123456789abcdef0"]) == "InvalidGroup.NotFound"
    stranger = Network(ec2, "10.21.0.0/16").group
    assert attempt([(0, 0, "efa")], Groups=[stranger]) == "InvalidParameter"
    groups = ec2.describe_security_groups()["SecurityGroups"]
    assert "sg-0123456789abcdef0" not in {group["GroupId"] for group in groups}


def test_a_zone_that_does_not_offer_the_type(ec2: Any, image: str) -> None:
    network = Network(ec2, zone="us-east-1f")
    assert refused(lambda: launch(ec2, image, network)) == ("Unsupported", 400)
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [TYPE]}]
    )["InstanceTypeOfferings"]
    assert "us-east-1f" not in {offer["Location"] for offer in offers}


@pytest.mark.parametrize(
    ("name", "cards", "efa"),
    [
        ("p3dn.24xlarge", 1, 1),
        ("p4d.24xlarge", 4, 4),
        ("p4de.24xlarge", 4, 4),
        ("p5.48xlarge", 32, 32),
        ("g5.48xlarge", 1, 1),
    ],
)
def test_instance_types_carry_their_network(ec2: Any, name: str, cards: int, efa: int) -> None:
    found = ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"][0]
    assert len(found["NetworkInfo"]["NetworkCards"]) == cards
    assert found["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"] == efa
    assert found["GpuInfo"]["Gpus"][0]["Count"] == 8
    assert "cluster" in found["PlacementGroupInfo"]["SupportedStrategies"]
    assert found["Hypervisor"] == "nitro"


def test_placement_groups(ec2: Any, image: str) -> None:
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "micsctl:cluster", "Value": "demo"}]}]
    made = ec2.create_placement_group(GroupName="pg", Strategy="cluster", TagSpecifications=tags)["PlacementGroup"]
    assert re.fullmatch(r"pg-[0-9a-f]{17}", made["GroupId"])
    assert refused(ec2.create_placement_group, GroupName="pg") == ("InvalidPlacementGroup.Duplicate", 400)
    ec2.create_tags(Resources=[made["GroupId"]], Tags=[{"Key": "more", "Value": "1"}])
    for name, value in (
        ("tag:micsctl:cluster", "demo"),
        ("tag-key", "more"),
        ("strategy", "cluster"),
        ("group-name", "p*"),
    ):
        assert ec2.describe_placement_groups(Filters=[{"Name": name, "Values": [value]}])["PlacementGroups"]
    assert not ec2.describe_placement_groups(Filters=[{"Name": "tag:more", "Values": ["2"]}])["PlacementGroups"]
    assert refused(ec2.describe_placement_groups, GroupNames=["other"])[0] == "InvalidPlacementGroup.Unknown"
    [one] = launch(ec2, image, Network(ec2), Placement={"GroupName": "pg"})
    wait_running(ec2, [one["InstanceId"]])
    assert refused(ec2.delete_placement_group, GroupName="pg") == ("InvalidPlacementGroup.InUse", 400)
    wipe(ec2)
    assert refused(ec2.delete_placement_group, GroupName="pg")[0] == "InvalidPlacementGroup.Unknown"


def test_states_status_and_console(ec2: Any, image: str) -> None:
    network = Network(ec2)
    [one] = launch(ec2, image, network)
    ids = [one["InstanceId"]]
    wait_running(ec2, ids)
    status = ec2.describe_instance_status(InstanceIds=ids)["InstanceStatuses"][0]
    assert status["InstanceStatus"]["Status"] == "ok"
    assert "Output" not in ec2.get_console_output(InstanceId=ids[0], Latest=True)
    assert "BEGIN SSH HOST KEY KEYS" in ec2.get_console_output(InstanceId=ids[0], Latest=True)["Output"]
    answer = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"][0]
    assert (answer["PreviousState"]["Name"], answer["CurrentState"]["Name"]) == ("running", "shutting-down")
    waiter = ec2.get_waiter("instance_terminated")
    waiter.config.delay = 0.1
    waiter.wait(InstanceIds=ids)
    [gone] = describe(ec2, ids)
    assert gone["NetworkInterfaces"] == []
    assert "PrivateIpAddress" not in gone
    assert ec2.describe_network_interfaces()["NetworkInterfaces"] == []
    assert ec2.describe_volumes()["Volumes"] == []
    assert refused(ec2.describe_instances, InstanceIds=["i-0123456789abcdef0"])[0] == "InvalidInstanceID.NotFound"
    assert refused(ec2.terminate_instances, InstanceIds=["i-0123456789abcdef0"])[0] == "InvalidInstanceID.NotFound"


def test_nothing_in_use_can_be_deleted(ec2: Any, image: str) -> None:
    network = Network(ec2)
    [one] = launch(ec2, image, network)
    other = ec2.create_security_group(GroupName="other", Description="other", VpcId=network.vpc)["GroupId"]
    refer = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": other}]}]
    ec2.authorize_security_group_ingress(GroupId=network.group, IpPermissions=refer)
    violation = ("DependencyViolation", 400)
    assert refused(ec2.delete_security_group, GroupId=network.group) == violation
    assert refused(ec2.delete_security_group, GroupId=other) == violation
    assert refused(ec2.delete_subnet, SubnetId=network.subnet) == violation
    assert refused(ec2.delete_vpc, VpcId=network.vpc) == violation
    assert refused(ec2.delete_internet_gateway, InternetGatewayId=network.gateway) == violation
    wait_running(ec2, [one["InstanceId"]])
    wipe(ec2)
    assert refused(ec2.delete_security_group, GroupId=other)[0] == "InvalidGroup.NotFound"


def test_elastic_ips(ec2: Any, image: str) -> None:
    network = Network(ec2)
    addresses = [ec2.allocate_address(Domain="vpc") for _ in range(5)]
    assert refused(ec2.allocate_address, Domain="vpc") == ("AddressLimitExceeded", 400)
    assert len({one["PublicIp"] for one in addresses}) == 5
    allocation = addresses[0]["AllocationId"]
    [one] = launch(ec2, image, network)
    instance_id, interface = one["InstanceId"], one["NetworkInterfaces"][0]["NetworkInterfaceId"]
    by_interface = {"AllocationId": allocation, "NetworkInterfaceId": interface}
    assert refused(ec2.associate_address, **by_interface)[0] == "InvalidInstanceID"  # still pending
    wait_running(ec2, [instance_id])
    several = refused(ec2.associate_address, AllocationId=allocation, InstanceId=instance_id)
    assert several == ("InvalidInstanceID", 400)
    ec2.associate_address(**by_interface)
    [found] = ec2.describe_addresses(AllocationIds=[allocation])["Addresses"]
    assert (found["InstanceId"], found["NetworkInterfaceId"]) == (instance_id, interface)
    assert describe(ec2, [instance_id])[0]["PublicIpAddress"] == addresses[0]["PublicIp"]
    assert refused(ec2.release_address, AllocationId=allocation)[0] == "InvalidIPAddress.InUse"
    detach = {"InternetGatewayId": network.gateway, "VpcId": network.vpc}
    assert refused(ec2.detach_internet_gateway, **detach)[0] == "DependencyViolation"
    ec2.terminate_instances(InstanceIds=[instance_id])
    waiter = ec2.get_waiter("instance_terminated")
    waiter.config.delay = 0.1
    waiter.wait(InstanceIds=[instance_id])
    assert "AssociationId" not in ec2.describe_addresses(AllocationIds=[allocation])["Addresses"][0]


def test_one_interface_gets_a_public_address_by_itself(ec2: Any, image: str) -> None:
    [one] = ec2.run_instances(
        ImageId=image,
        InstanceType="p3dn.24xlarge",
        MinCount=1,
        MaxCount=1,
        Placement={"AvailabilityZone": "us-east-1c"},
    )["Instances"]
    wait_running(ec2, [one["InstanceId"]])
    assert describe(ec2, [one["InstanceId"]])[0]["PublicIpAddress"].startswith("198.18.")


def test_topology_has_three_layers_and_pages(ec2: Any, image: str) -> None:
    ec2.create_placement_group(GroupName="pg", Strategy="cluster")
    launched = launch(ec2, image, Network(ec2), MinCount=4, MaxCount=4, Placement={"GroupName": "pg"})
    ids = [one["InstanceId"] for one in launched]
    wait_running(ec2, ids)
    rows = {row["InstanceId"]: row for row in ec2.describe_instance_topology(InstanceIds=ids)["Instances"]}
    layers = [rows[one]["NetworkNodes"] for one in ids]
    assert all(len(layer) == 3 for layer in layers)
    assert len({layer[0] for layer in layers}) == len({layer[1] for layer in layers}) == 1
    assert layers[0][2] == layers[2][2] != layers[1][2] == layers[3][2]
    assert {row["GroupName"] for row in rows.values()} == {"pg"}
    assert {row["ZoneId"] for row in rows.values()} != {""}
    pages = ec2.get_paginator("describe_instance_topology").paginate(
        GroupNames=["pg"], PaginationConfig={"PageSize": 3}
    )
    assert [len(page["Instances"]) for page in pages] == [3, 1]
    both = refused(ec2.describe_instance_topology, InstanceIds=ids, MaxResults=1)
    assert both[0] == "InvalidParameterCombination"


def test_images_of_the_parameters_exist(hostless: Sandbox, client: Callable[..., Any]) -> None:
    seen = set()
    for region in ("us-east-1", "us-west-2"):
        for release in ("22.04", "24.04"):
            value = client(hostless[1], "ssm", region).get_parameter(Name=IMAGE.format(release))["Parameter"]["Value"]
            [found] = client(hostless[1], region=region).describe_images(ImageIds=[value])["Images"]
            assert found["RootDeviceName"] == "/dev/sda1"
            seen.add(value)
    assert len(seen) == 4
    missing = client(hostless[1], "ssm").get_parameter
    assert refused(missing, Name="/aws/service/deeplearning/none")[0] == "ParameterNotFound"


def test_what_is_not_modelled_says_so(ec2: Any, image: str) -> None:
    launch(ec2, image, Network(ec2))  # moto looks at an instance filter only where there are instances
    assert refused(ec2.describe_capacity_block_offerings, CapacityDurationHours=24) == ("UnsupportedOperation", 400)
    unknown_filter = [{"Name": "nonsense", "Values": ["1"]}]
    assert refused(ec2.describe_instances, Filters=unknown_filter) == ("UnsupportedOperation", 400)
    ec2.create_placement_group(GroupName="pg")
    assert refused(ec2.describe_placement_groups, Filters=unknown_filter)[0] == "InvalidParameterValue"


def test_faults(hostless: Sandbox, ec2: Any, image: str, client: Callable[..., Any]) -> None:
    network = Network(ec2)
    control.inject(
        hostless[0],
        Fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1a", times=1),
        Fault("RunInstances", "InsufficientInstanceCapacity", zone="us-east-1b"),
        Fault("DescribeVpcs", "RequestLimitExceeded", times=2, skip=1),
    )
    assert refused(lambda: launch(ec2, image, network)) == ("InsufficientInstanceCapacity", 500)
    assert launch(ec2, image, network)
    ec2.describe_vpcs()
    assert refused(ec2.describe_vpcs) == ("RequestLimitExceeded", 503)
    assert client(hostless[1], retries={"mode": "standard", "total_max_attempts": 3}).describe_vpcs()["Vpcs"]
    assert [fault.times for fault in control.faults(hostless[0])] == [0, None, 0]
    control.clear_faults(hostless[0])
    assert control.faults(hostless[0]) == []


def test_instances_may_be_invisible_at_first(hostless: Sandbox, ec2: Any, image: str) -> None:
    control.inject(hostless[0], Fault("RunInstances", "DelayedVisibility", times=1, seconds=1.0))
    [one] = launch(ec2, image, Network(ec2))
    assert refused(ec2.describe_instances, InstanceIds=[one["InstanceId"]])[0] == "InvalidInstanceID.NotFound"
    assert one["InstanceId"] not in str(ec2.describe_instances()["Reservations"])
    time.sleep(1.1)
    assert describe(ec2, [one["InstanceId"]])


def test_only_the_key_opens(hostless: Sandbox, client: Callable[..., Any]) -> None:
    settings = hostless[1].settings
    for service, call, arguments in (
        ("ec2", "describe_vpcs", {}),
        ("sts", "get_caller_identity", {}),
        ("ssm", "get_parameter", {"Name": "x"}),
    ):
        good = client(hostless[1], service)
        for changed in ({"access_key": "AKIA0000000000000000"}, {"secret_key": "wrong"}):
            bad = client(
                control.SandboxInfo(
                    **{**vars(hostless[1]), "settings": type(settings)(**{**vars(settings), **changed})}
                ),
                service,
            )
            assert refused(getattr(bad, call), **arguments)[0] in ("AuthFailure", "UnrecognizedClientException")
        assert good.meta.endpoint_url == settings.endpoint_url
    assert client(hostless[1], "sts").get_caller_identity()["Account"]
    for path in ("/", "/_sandbox/about", "/_sandbox/faults"):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"{settings.endpoint_url}{path}", timeout=5)
        assert raised.value.code == 401


def test_secret_is_in_a_closed_file(hostless: Sandbox) -> None:
    folder = hostless[0].sandbox
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "state.json").stat().st_mode & 0o777 == 0o600


def test_user_data_travels(ec2: Any, image: str) -> None:
    [one] = launch(ec2, image, Network(ec2), UserData="#!/bin/sh\necho ä\n")
    data = ec2.describe_instance_attribute(InstanceId=one["InstanceId"], Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(data).decode() == "#!/bin/sh\necho ä\n"
