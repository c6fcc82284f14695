"""What RunInstances is told: the emulator loses a part of it, so the parameters themselves are looked at."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.stub import Stubber
from hypothesis import given
from hypothesis import strategies as st

from micsctl.aws.images import Image, parse_image
from micsctl.aws.instances import Launch, LaunchRefused, network_interfaces, run_instances, run_instances_parameters
from micsctl.aws.session import Aws, connect
from micsctl.aws.settings import AwsSettings
from micsctl.aws.types import InstanceType, parse_type

P4D = InstanceType("p4d.24xlarge", 8, (0, 1, 2, 3), True, True)


def a_type(cards: int, efa: int, *, says_so: bool) -> dict[str, Any]:
    """An element of DescribeInstanceTypes whose last `efa` cards take EFA."""
    listed = [
        {"NetworkCardIndex": index}
        | ({"InterfaceTypes": ["interface", "efa"] if index >= cards - efa else ["interface"]} if says_so else {})
        for index in range(cards)
    ]
    network: dict[str, Any] = {"NetworkCards": listed[::-1]}  # the order is not promised
    if efa:
        network["EfaInfo"] = {"MaximumEfaInterfaces": efa}
    return {"InstanceType": "x.large", "NetworkInfo": network, "Hypervisor": "nitro"}


def launch(**change: Any) -> Launch:
    values: dict[str, Any] = {
        "nodes": 4,
        "type": P4D,
        "image": Image("ami-1", "/dev/sda1", 75),
        "volume_gb": 200,
        "subnet_id": "subnet-1",
        "security_group_id": "sg-1",
        "key_name": "micsctl-demo",
        "placement_group": "micsctl-demo-us-east-1a",
        "user_data": "#!/bin/bash\n",
        "tags": {"micsctl:cluster": "demo", "micsctl:ends-at": "1800000000"},
    }
    return Launch(**(values | change))


def places(type: InstanceType) -> list[tuple[int, int, str]]:
    return [
        (one["NetworkCardIndex"], one["DeviceIndex"], one["InterfaceType"])
        for one in network_interfaces(type, "subnet-1", "sg-1")
    ]


def test_p4d_gets_four_efa_interfaces_and_one_for_ip() -> None:
    assert places(P4D) == [
        (0, 0, "interface"),
        (0, 1, "efa-only"),
        (1, 0, "efa-only"),
        (2, 0, "efa-only"),
        (3, 0, "efa-only"),
    ]


def test_card_0_without_efa_gets_only_the_plain_interface() -> None:
    type = parse_type(a_type(3, 2, says_so=True))
    assert places(type) == [(0, 0, "interface"), (1, 0, "efa-only"), (2, 0, "efa-only")]


def test_a_type_without_efa_gets_a_single_interface() -> None:
    assert places(parse_type(a_type(1, 0, says_so=True))) == [(0, 0, "interface")]
    assert places(parse_type({"InstanceType": "t2.micro"})) == [(0, 0, "interface")]


@given(cards=st.integers(1, 32), data=st.data(), says_so=st.booleans())
def test_every_efa_card_is_used_once(cards: int, data: st.DataObject, says_so: bool) -> None:
    efa = data.draw(st.integers(0, cards))
    chosen = places(parse_type(a_type(cards, efa, says_so=says_so)))
    assert [card for card, _, kind in chosen if kind == "efa-only"] == list(range(cards - efa, cards))
    assert chosen[0] == (0, 0, "interface")
    assert len({(card, device) for card, device, _ in chosen}) == len(chosen) == efa + 1


def test_all_or_nothing_and_everything_ends_with_the_instance() -> None:
    parameters = run_instances_parameters(launch(), "token-1")
    assert parameters["MinCount"] == parameters["MaxCount"] == 4
    assert parameters["ClientToken"] == "token-1"
    assert parameters["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert parameters["MetadataOptions"]["HttpTokens"] == "required"
    assert parameters["Placement"] == {"GroupName": "micsctl-demo-us-east-1a"}
    assert parameters["BlockDeviceMappings"] == [
        {
            "DeviceName": "/dev/sda1",
            "Ebs": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
        }
    ]
    assert all(one["DeleteOnTermination"] for one in parameters["NetworkInterfaces"])
    assert "AssociatePublicIpAddress" not in str(parameters)
    assert "SubnetId" not in parameters  # AWS refuses it beside NetworkInterfaces
    assert "SecurityGroupIds" not in parameters
    assert "IamInstanceProfile" not in parameters
    profile = run_instances_parameters(launch(instance_profile="mics-nodes"), "token-1")["IamInstanceProfile"]
    assert profile == {"Name": "mics-nodes"}
    tagged = {one["ResourceType"]: one["Tags"] for one in parameters["TagSpecifications"]}
    assert set(tagged) == {"instance", "volume", "network-interface"}
    assert all({"Key": "micsctl:cluster", "Value": "demo"} in tags for tags in tagged.values())


def test_no_placement_group_and_a_volume_not_smaller_than_the_image() -> None:
    parameters = run_instances_parameters(launch(placement_group=None, volume_gb=30), "token-1")
    assert "Placement" not in parameters
    assert parameters["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 75


def test_image_sizes_come_from_the_root_device() -> None:
    raw = {
        "ImageId": "ami-1",
        "RootDeviceName": "/dev/sda1",
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 75}},
            {"DeviceName": "/dev/sdc", "Ebs": {"VolumeSize": 500}},
        ],
    }
    assert parse_image(raw) == Image("ami-1", "/dev/sda1", 75)


@pytest.fixture
def aws() -> Aws:
    return connect(AwsSettings(region="us-east-1", access_key="a", secret_key="b", poll_seconds=0.001))


def _started() -> dict[str, Any]:
    # AWS does not promise an order
    return {"Instances": [{"InstanceId": f"i-{n}", "AmiLaunchIndex": n} for n in (2, 0, 3, 1)]}


def test_botocore_accepts_the_request_and_ids_come_in_launch_order(aws: Aws) -> None:
    parameters = run_instances_parameters(launch(), "token-1")
    with Stubber(aws.launcher) as stub:  # it checks the parameters against EC2's model
        stub.add_response("run_instances", _started(), parameters)
        assert run_instances(aws, parameters, "us-east-1a") == ["i-0", "i-1", "i-2", "i-3"]


@pytest.mark.parametrize(("code", "status"), [("RequestLimitExceeded", 503), ("InternalError", 500)])
def test_a_slowed_down_or_lost_launch_is_repeated_with_the_same_token(aws: Aws, code: str, status: int) -> None:
    parameters = run_instances_parameters(launch(), "token-1")
    with Stubber(aws.launcher) as stub:
        stub.add_client_error("run_instances", code, http_status_code=status, expected_params=parameters)
        stub.add_response("run_instances", _started(), parameters)
        assert run_instances(aws, parameters, "us-east-1a")
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("code", "status", "zone_only"),
    [("InsufficientInstanceCapacity", 500, True), ("Unsupported", 400, True), ("VcpuLimitExceeded", 400, False)],
)
def test_a_refusal_is_not_repeated(aws: Aws, code: str, status: int, zone_only: bool) -> None:
    with Stubber(aws.launcher) as stub:
        stub.add_client_error("run_instances", code, http_status_code=status)
        with pytest.raises(LaunchRefused) as refused:
            run_instances(aws, run_instances_parameters(launch(), "token-1"), "us-east-1a")
    assert refused.value.code == code
    assert refused.value.zone_only is zone_only
    assert not refused.value.unknown


def test_capacity_errors_are_not_retried_under_our_feet(aws: Aws) -> None:
    """botocore repeats HTTP 500 by itself; the client for RunInstances must not."""
    calls = []

    def send(request: Any, **kwargs: Any) -> AWSResponse:
        calls.append(request)
        answer = AWSResponse(request.url, 500, {}, None)
        answer._content = (
            b"<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code><Message>no</Message></Error></Errors>"
            b"<RequestID>r</RequestID></Response>"
        )
        return answer

    aws.launcher.meta.events.register("before-send.ec2.RunInstances", send)
    with pytest.raises(LaunchRefused):
        run_instances(aws, run_instances_parameters(launch(), "token-1"), "us-east-1a")
    assert len(calls) == 1
