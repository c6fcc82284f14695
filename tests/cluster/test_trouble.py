"""Lost answers, slow machines, broken nodes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from micsctl.aws.inventory import resources
from micsctl.aws.session import Aws
from micsctl.cluster import launch as launch_module
from micsctl.cluster.down import Down
from micsctl.cluster.journal import Journal, launched_ids, open_launch
from micsctl.cluster.model import Cluster
from micsctl.errors import Interrupted, PartialError
from micsctl.home import ClusterFiles
from micsctl.remote.host import Host, HostError, HostKeyError

Up = Callable[..., Cluster]
DownCall = Callable[..., Down]
Kinds = Callable[[], dict[str, int]]


@pytest.fixture
def crash_after_launch(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop dies between the first launch and its record."""
    real = aws.launcher.run_instances

    def run_instances(**parameters: Any) -> Any:
        real(**parameters)
        monkeypatch.setattr(aws.launcher, "run_instances", real)
        raise SystemError("the laptop died")

    monkeypatch.setattr(aws.launcher, "run_instances", run_instances)


def test_a_lost_answer_and_throttling_do_not_make_a_second_set(
    emulator: Any, aws: Aws, kinds: Kinds, bring_up: Up, bring_down: DownCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = aws.launcher.run_instances, list[str]()

    def run_instances(**parameters: Any) -> Any:
        calls.append(parameters["ClientToken"])
        answer = real(**parameters)
        if len(calls) == 2:
            raise ReadTimeoutError(endpoint_url="https://ec2")
        return answer

    monkeypatch.setattr(aws.launcher, "run_instances", run_instances)
    emulator.fault("RunInstances", "RequestLimitExceeded", times=1)
    assert len(bring_up().nodes) == 2
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert kinds()["instance"] == 2
    bring_down()


@pytest.mark.usefixtures("crash_after_launch")
def test_up_again_after_a_crash_goes_on_with_machines_that_aws_does_not_show_yet(
    emulator: Any, files: ClusterFiles, kinds: Kinds, bring_up: Up, bring_down: DownCall
) -> None:
    emulator.fault("RunInstances", "DelayedVisibility", seconds=2, times=1)
    with pytest.raises(SystemError):
        bring_up()
    lost = open_launch(Journal(files.journal).read())
    assert lost
    again = bring_up()
    assert int(again.ends_at.timestamp()) == lost.ends_at
    assert kinds()["instance"] == 2
    bring_down()


@pytest.mark.usefixtures("crash_after_launch")
def test_down_after_a_crash_waits_for_machines_that_may_still_appear(
    emulator: Any, bring_up: Up, bring_down: DownCall
) -> None:
    emulator.fault("RunInstances", "DelayedVisibility", seconds=1, times=1)
    with pytest.raises(SystemError):
        bring_up()
    assert len(bring_down().instances) == 2
    assert emulator.resources() == []


def test_machines_that_end_for_lack_of_capacity_fall_to_the_next_zone(
    emulator: Any, aws: Aws, kinds: Kinds, bring_up: Up, bring_down: DownCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS accepts the launch and ends the machines again."""
    real, told = launch_module.wait_running, list[str]()

    def wait_running(*arguments: Any) -> Any:
        running = real(*arguments)
        if not told:
            told.append(running[0].zone)
            reason = "Server.InsufficientInstanceCapacity: Insufficient capacity to satisfy instance request"
            raise launch_module.NodesEnded([replace(running[0], state="terminated", reason=reason)])
        return running

    monkeypatch.setattr(launch_module, "wait_running", wait_running)
    cluster = bring_up()
    assert (told, cluster.zone) == (["us-east-1a"], "us-east-1b")
    assert kinds()["instance"] == 2
    assert kinds()["placement group"] == 1
    bring_down()


def test_up_again_after_a_crash_half_way_makes_nothing_twice(
    emulator: Any, aws: Aws, kinds: Kinds, bring_up: Up, bring_down: DownCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(**parameters: Any) -> Any:
        raise SystemError("the laptop died")

    for call in ("attach_internet_gateway", "authorize_security_group_egress", "import_key_pair"):
        with monkeypatch.context() as patch:
            patch.setattr(aws.ec2, call, crash)
            with pytest.raises(SystemError):
                bring_up()
    bring_up()
    once = {"VPC", "subnet", "internet gateway", "security group", "key pair", "Elastic IP", "placement group"}
    assert {kind: kinds()[kind] for kind in once} == dict.fromkeys(once, 1)
    [group] = aws.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["micsctl-demo"]}])[
        "SecurityGroups"
    ]
    assert any(rule["UserIdGroupPairs"] for rule in group["IpPermissionsEgress"])
    bring_down()


def test_nodes_that_do_not_get_ready(emulator: Any, bring_up: Up, bring_down: DownCall, open_hosts_with: Any) -> None:
    failed_bootstrap = {1: {".micsctl/ready": "installing torch 2.13.0 failed (exit 1): no network\n"}}
    with pytest.raises(PartialError, match="the bootstrap failed on 1 of 2 nodes") as failed:
        bring_up(open_hosts=open_hosts_with(failed_bootstrap))
    assert "node 1: failed: installing torch 2.13.0 failed (exit 1): no network" in failed.value.why
    assert "2 instances: " in failed.value.costs
    assert "1 Elastic IP: " in failed.value.costs
    assert "end by themselves at" in failed.value.costs
    assert "micsctl down -n demo" in failed.value.next

    late = {
        0: {".micsctl/ready": None},
        1: {".micsctl/ready": HostError("cannot reach node 1", "connection refused", transient=True)},
    }
    with pytest.raises(PartialError, match="2 of 2 nodes did not become ready in time") as failed:
        bring_up(open_hosts=open_hosts_with(late), ready_seconds=0.1)
    assert "node 0: bootstrap: installing torch" in failed.value.why
    assert "node 1: port: connection refused" in failed.value.why

    with pytest.raises(PartialError, match="another host key"):
        bring_up(open_hosts=open_hosts_with({1: {".micsctl/ready": HostKeyError("node 1 shows another host key")}}))

    assert len(bring_up().nodes) == 2  # whatever it was is repaired: up goes on
    bring_down()


def test_a_node_that_ends_while_waiting_is_named(
    emulator: Any, aws: Aws, bring_up: Up, bring_down: DownCall, open_hosts_with: Any
) -> None:
    ending = threading.Event()

    @contextmanager
    def open_hosts(cluster: Cluster, files: ClusterFiles) -> Iterator[Sequence[Host]]:
        if not ending.is_set():
            emulator.end(cluster.nodes[1].instance_id)
            ending.set()
        with open_hosts_with({0: {".micsctl/ready": None}})(cluster, files) as hosts:
            yield hosts

    with pytest.raises(PartialError, match=r"^node 1 \(i-.*\) ended") as failed:
        bring_up(open_hosts=open_hosts, ready_seconds=60)
    assert "Client.InstanceInitiatedShutdown" in failed.value.why
    assert "1 instance: " in failed.value.costs
    bring_down()


def test_ctrl_c_with_machines_says_what_exists(
    emulator: Any, aws: Aws, files: ClusterFiles, kinds: Kinds, bring_up: Up, bring_down: DownCall, monkeypatch: Any
) -> None:
    """It comes while the machines are started, which must end before it takes effect."""
    real = aws.launcher.run_instances

    def run_instances(**parameters: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(**parameters)

    monkeypatch.setattr(aws.launcher, "run_instances", run_instances)
    with pytest.raises(Interrupted) as stopped:
        bring_up()
    assert "2 instances: " in stopped.value.costs
    assert "micsctl down -n demo" in stopped.value.next
    assert kinds()["instance"] == 2
    assert len(launched_ids(Journal(files.journal).read())) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    bring_down()


def test_ctrl_c_before_machines_rolls_back(
    emulator: Any, aws: Aws, bring_up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**parameters: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(aws.ec2, "allocate_address", interrupted)
    with pytest.raises(Interrupted) as stopped:
        bring_up()
    assert stopped.value.costs == "nothing is running; nothing costs money"
    assert emulator.resources() == []


def test_ctrl_c_during_down_lists_what_is_left(
    emulator: Any, aws: Aws, bring_up: Up, bring_down: DownCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up()

    def interrupted(**parameters: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(aws.ec2, "delete_security_group", interrupted)
        with pytest.raises(Interrupted) as stopped:
            bring_down()
    assert "1 security group: " in stopped.value.costs
    assert "instance" not in {one.kind for one in resources(aws, "demo")}
    bring_down()
    assert emulator.resources() == []
