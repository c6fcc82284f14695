"""What a node does with S3 and with its metadata service, over SSH, at both levels: boto3 without any settings."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from micsctl.home import Home
from micsctl.sandbox import control
from micsctl.sandbox.control import SandboxInfo
from micsctl.sandbox.faults import Fault
from micsctl.spec import SandboxSpec

ROOT = os.geteuid() == 0
PROCESS = [] if ROOT and Path("/run/systemd/system").is_dir() else ["process"]  # there it is refused to root
LEVELS = [*(["netns"] if ROOT else []), *PROCESS]
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]
IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
PYTHON = "${MICSCTL_PYTHON:-/opt/pytorch/bin/python} -"
MIB = 1 << 20


@dataclass(frozen=True)
class Nodes:
    """Two instances of one launch: `with_role` says how they were started."""

    home: Home
    info: SandboxInfo
    ec2: Any
    s3: Any
    ids: list[str]
    addresses: list[str]
    key: Path

    def python(self, index: int, script: str) -> Any:
        """What the script prints as JSON."""
        settings = self.info.settings
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes", "LogLevel=ERROR"]
        words = [word for option in options for word in ("-o", option)]
        target = f"{settings.ssh_user}@{self.addresses[index]}"
        done = subprocess.run(
            ["ssh", "-F", "none", "-i", self.key, "-p", str(settings.ssh_port), *words, target, PYTHON],
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def state(self, index: int) -> dict[str, Any]:
        found = self.ec2.describe_instances(InstanceIds=[self.ids[index]])["Reservations"][0]["Instances"][0]
        return {"name": found["State"]["Name"], "reason": found.get("StateReason", {}).get("Code")}


@pytest.fixture(scope="module", params=LEVELS)
def nodes(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    running: Callable[..., Any],
    client: Callable[..., Any],
    wait_for: Callable[..., Any],
) -> Iterator[Nodes]:
    """Nodes 0 and 1 have the role; node 2 is of another launch, without."""
    folder = tmp_path_factory.mktemp(request.param)
    with running(folder / "home", request.param, SandboxSpec(link_mbps=800)) as (home, info):
        ec2 = client(info)
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=10)
        ec2.import_key_pair(KeyName="key", PublicKeyMaterial=key.with_suffix(".pub").read_bytes())
        subnet = ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": ["us-east-1a"]}])["Subnets"][0]
        vpc = [{"Name": "vpc-id", "Values": [subnet["VpcId"]]}]
        group = ec2.describe_security_groups(Filters=vpc)["SecurityGroups"][0]
        ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 2222, "IpRanges": [{"CidrIp": info.settings.caller_cidr}]}
        ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[ssh])
        launch = {
            "ImageId": client(info, "ssm").get_parameter(Name=IMAGE)["Parameter"]["Value"],
            "InstanceType": "t3.micro",
            "KeyName": "key",
            "SubnetId": subnet["SubnetId"],
            "SecurityGroupIds": [group["GroupId"]],
            "MetadataOptions": {"HttpTokens": "required"},
        }
        profile = {"IamInstanceProfile": {"Name": "mics-nodes"}}
        launched = ec2.run_instances(**launch, **profile, MinCount=2, MaxCount=2)["Instances"]
        launched += ec2.run_instances(**launch, MinCount=1, MaxCount=1)["Instances"]
        ids = [one["InstanceId"] for one in launched]
        wait_for(lambda: _ready(ec2, ids))
        found = [ec2.describe_instances(InstanceIds=[one])["Reservations"][0]["Instances"][0] for one in ids]
        s3 = client(info, "s3")
        s3.create_bucket(Bucket="checkpoints")
        yield Nodes(home, info, ec2, s3, ids, [one["PublicIpAddress"] for one in found], key)


def _ready(ec2: Any, ids: list[str]) -> bool:
    rows = ec2.describe_instance_status(InstanceIds=ids)["InstanceStatuses"]
    return [row["InstanceStatus"]["Status"] for row in rows] == ["ok"] * len(ids)


USE = """
import boto3, hashlib, io, json, os, time
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

def counted():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read()) if os.path.exists("/sys/class/net/eth0") else 0

def code(call, **arguments):
    try: call(**arguments)
    except ClientError as error: return error.response["Error"]["Code"]

session = boto3.Session()
method = session.get_credentials().method
s3 = session.client("s3")
body = os.urandom(12 << 20)
before = counted()
s3.put_object(Bucket="checkpoints", Key="whole", Body=body)
on_wire = counted() - before
s3.upload_fileobj(io.BytesIO(body), "checkpoints", "parts", Config=TransferConfig(5 << 20, multipart_chunksize=5 << 20))
part = s3.get_object(Bucket="checkpoints", Key="parts", Range="bytes=5242870-5242890")["Body"].read()
into = io.BytesIO()
s3.download_fileobj("checkpoints", "parts", into)
elsewhere = dict(endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
frozen = session.get_credentials().get_frozen_credentials()
forged = boto3.client("s3", aws_access_key_id=frozen.access_key, aws_secret_access_key="x",
                      aws_session_token=frozen.token)
print(json.dumps({
    "method": method, "md5": hashlib.md5(body).hexdigest(), "on_wire": on_wire,
    "range": part == body[5242870:5242891], "back": into.getvalue() == body,
    "keys": [one["Key"] for one in s3.list_objects_v2(Bucket="checkpoints")["Contents"]],
    "left": len(s3.delete_objects(Bucket="checkpoints", Delete={"Objects": [{"Key": "parts"}]})["Deleted"]),
    "ec2": code(session.client("ec2", **elsewhere).describe_instances),
    "ssm": code(session.client("ssm", **elsewhere).get_parameter, Name="x"),
    "forged": code(forged.list_buckets), "region": s3.meta.region_name,
    "environment": {n: v for n, v in os.environ.items() if n.startswith("AWS_")},
}))
"""


def test_a_role_uses_s3_without_settings_and_nothing_else(nodes: Nodes) -> None:
    for index in (0, 1):  # every instance of the launch has the role
        found = nodes.python(index, USE)
        assert found["method"] == "iam-role"
        assert (found["range"], found["back"], found["left"]) == (True, True, 1)
        assert found["keys"] == ["parts", "whole"]
        assert (found["ec2"], found["ssm"]) == ("UnauthorizedOperation", "AccessDeniedException")
        assert found["forged"] == "SignatureDoesNotMatch"
        assert found["region"] == "us-east-1"
        body = nodes.s3.get_object(Bucket="checkpoints", Key="whole")["Body"].read()
        assert hashlib.md5(body).hexdigest() == found["md5"]
        if nodes.info.level == "netns":
            assert 12 * MIB < found["on_wire"] < 12.5 * MIB  # as on AWS, S3 is reached through the node's link
            assert found["environment"] == {
                "AWS_ENDPOINT_URL_S3": "http://198.19.255.80",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        else:
            metadata = found["environment"].pop("AWS_EC2_METADATA_SERVICE_ENDPOINT")
            assert metadata.endswith(f"/{nodes.ids[index]}")
            assert found["environment"] == {
                "AWS_ENDPOINT_URL_S3": nodes.info.settings.endpoint_url,
                "AWS_DEFAULT_REGION": "us-east-1",
            }


def test_without_a_role_there_are_no_credentials(nodes: Nodes) -> None:
    refused = nodes.python(
        2,
        """
import boto3, json, os, urllib.request, urllib.error
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError
said = []
for client in (boto3.client("s3"), boto3.client("s3", config=Config(signature_version=UNSIGNED))):
    try: client.get_object(Bucket="checkpoints", Key="whole")
    except NoCredentialsError as error: said.append("none")
    except ClientError as error: said.append(error.response["ResponseMetadata"]["HTTPStatusCode"])
print(json.dumps(said))
""",
    )
    assert refused == ["none", 401]


NOTICE = """
import json, urllib.request, urllib.error, os
base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254") + "/latest/"
def ask(path, method, name, value):
    request = urllib.request.Request(base + path, method=method, headers={"X-aws-ec2-metadata-token" + name: value})
    return urllib.request.urlopen(request, timeout=5).read().decode()
token = ask("api/token", "PUT", "-ttl-seconds", "60")
try: print(ask("meta-data/spot/instance-action", "GET", "", token))
except urllib.error.HTTPError as error: print(error.code)
"""


def test_a_spot_notice_comes_first_and_then_the_end(nodes: Nodes, wait_for: Callable[..., Any]) -> None:
    """The last test of these nodes."""
    assert [nodes.python(index, NOTICE) for index in (0, 1)] == [404, 404]
    control.inject(nodes.home, Fault("*", "SpotInterruption", instance=nodes.ids[1]))
    first, again = nodes.python(1, NOTICE), nodes.python(1, NOTICE)
    assert first["action"] == "terminate"
    assert first == again  # the time is fixed
    assert nodes.python(0, NOTICE) == 404
    control.clear_faults(nodes.home)
    assert nodes.python(1, NOTICE) == 404
    control.inject(nodes.home, Fault("*", "SpotInterruption", instance=nodes.ids[1], seconds=0.5))
    wait_for(lambda: nodes.state(1)["name"] == "terminated")
    assert nodes.state(1)["reason"] == "Server.SpotInstanceTermination"
    assert nodes.state(0)["name"] == "running"
