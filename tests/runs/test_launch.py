"""From run.json to processes, and from processes to an exit code, in real shells."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mics.config import RunConfig, TrainConfig

from micsctl import resources
from micsctl.errors import JobError, MicsctlError, UsageError
from micsctl.planner.machines import machines_from
from micsctl.planner.plan import plan
from micsctl.runs import code
from micsctl.runs.environment import environment
from micsctl.runs.follow import follow, how_it_ended
from micsctl.runs.launch import configure, start, start_script
from micsctl.runs.logs import rank_log
from micsctl.runs.model import Failure, Run, Status, checked_run_id, new_run_id
from micsctl.runs.prepare import trial_seconds
from micsctl.runs.state import first_failure, list_runs
from micsctl.runs.stop import stop
from micsctl.topology.model import Device, Topology

from .conftest import LocalHost, processes_with

RESOLVED: dict[str, Any] = {
    "partition": 2,
    "hierarchical": False,
    "micro_batch": 1,
    "precision": "fp32",
    "checkpointing": "none",
    "reshard_after_forward": True,
}
Hosts = list[Any]


def config_of(topology: Topology, run_id: str = "0101-000000-mics-aaaa") -> RunConfig:
    train = TrainConfig(**RESOLVED, steps=3)
    return RunConfig(run_id=run_id, train=train, nodes=len(topology.nodes), devices_per_node=2)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a trainer of two lines in the place of the real one; torchrun and the shells around it stay."""

    def put(body: str) -> None:
        package = tmp_path / "code" / "mics"
        if not package.exists():
            shutil.copytree(resources.trainer(), package, ignore=shutil.ignore_patterns("__pycache__"))
        prelude = "import json, os, sys, time, signal\n"
        prelude += "rank, folder = int(os.environ['RANK']), os.path.dirname(sys.argv[2])\n"
        (package / "train.py").write_text(prelude + body)
        monkeypatch.setattr(resources, "trainer", lambda: package)

    return put


class Seen:
    def __init__(self) -> None:
        self.metrics_lines: list[dict[str, Any]] = []
        self.output_lines: list[str] = []

    def metrics(self, line: dict[str, Any]) -> None:
        self.metrics_lines.append(line)

    def output(self, line: str) -> None:
        self.output_lines.append(line)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_run_is_started_followed_and_listed(hosts: Hosts, topology: Topology, trainer: Callable[[str], None]) -> None:
    trainer(
        "print('hello from', rank, os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])\n"
        "if rank == 0:\n"
        "    time.sleep(1)\n"
        "    open(folder + '/fresh', 'w').close()\n"
        "    os.replace(folder + '/fresh', folder + '/metrics.jsonl')\n"
        "    for step in (1, 2):\n"
        "        line = json.dumps({'step': step, 'loss': 1.5})\n"
        "        print(line, file=open(folder + '/metrics.jsonl', 'a'), flush=True)\n"
        "        time.sleep(0.3)\n"
    )
    config, seen = config_of(topology), Seen()
    start(hosts, topology, config)
    follow(hosts, config.run_id, seen, poll_seconds=0.2)
    assert [line["step"] for line in seen.metrics_lines] == [1, 2]
    assert seen.output_lines == ["hello from 0 4 127.0.0.1"]
    [run] = list_runs(hosts)
    assert (run.status, run.last_step, run.last_loss) == (Status.DONE, 2, 1.5)
    assert run.config == config
    logs = sorted(
        p.read_text().split()[2] for h in hosts for p in h.home.glob(".micsctl/runs/*/ranks/*/*/*/stdout.log")
    )
    assert logs == ["0", "1", "2", "3"]


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_the_first_failed_rank_is_named_and_nothing_is_left(
    hosts: Hosts, topology: Topology, trainer: Callable[[str], None]
) -> None:
    """Rank 3 is killed; its peers would go on for ever."""
    trainer(
        "if rank == 3:\n"
        "    print('about to die', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    config = config_of(topology)
    start(hosts, topology, config)
    with pytest.raises(JobError) as raised:
        follow(hosts, config.run_id, Seen(), poll_seconds=0.2, grace_seconds=1)
    assert "rank 3 on node 1 (i-1) was killed by SIGKILL" in raised.value.what
    assert "about to die" in raised.value.why
    assert processes_with(f"MICS_RUN_ID={config.run_id}") == []
    assert list_runs(hosts)[0].status is Status.FAILED


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_exit_code_2_is_the_users_mistake(hosts: Hosts, topology: Topology, trainer: Callable[[str], None]) -> None:
    trainer("print('mics: the corpus is empty', file=sys.stderr)\nsys.exit(2)\n")
    config = config_of(topology)
    start(hosts, topology, config)
    with pytest.raises(UsageError, match="refused by the trainer") as raised:
        follow(hosts, config.run_id, Seen(), poll_seconds=0.2)
    assert "the corpus is empty" in raised.value.why


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_stop_asks_first_and_ends_only_its_own_run(
    hosts: Hosts, topology: Topology, trainer: Callable[[str], None]
) -> None:
    trainer(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "open(folder + f'/up{rank}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    config = config_of(topology)
    start(hosts, topology, config)
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "MICS_RUN_ID": "0101-000000-mics-bbbb"})
    try:
        with pytest.raises(UsageError, match="still going on"):
            start(hosts, topology, replace(config, run_id="0101-000001-mics-cccc"))
        for host in hosts:
            host.run(f"until [ $(ls .micsctl/runs/{config.run_id}/up* 2>/dev/null | wc -l) = 2 ]; do sleep 0.1; done")
        stop(hosts, config.run_id, grace_seconds=20)
        assert processes_with(f"MICS_RUN_ID={config.run_id}") == []
        assert other.poll() is None
        assert list_runs(hosts)[0].status is Status.STOPPED
    finally:
        other.kill()
        other.wait(timeout=10)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_run_that_is_stopped_before_it_can_save_is_no_failure(
    hosts: Hosts, topology: Topology, trainer: Callable[[str], None]
) -> None:
    trainer("time.sleep(600)\n")  # SIGTERM ends it, as it ends a rank that still imports torch
    config = config_of(topology)
    start(hosts, topology, config)
    for host in hosts:
        host.run(f"until ls .micsctl/runs/{config.run_id}/ranks/*/attempt_0/1/stdout.log; do sleep 0.1; done")
    stop(hosts, config.run_id, grace_seconds=20)
    [run] = list_runs(hosts)
    assert (run.status, run.saved_when_stopped) == (Status.STOPPED, False)
    with pytest.raises(JobError, match="was stopped") as raised:
        follow(hosts, config.run_id, Seen(), poll_seconds=0.2)
    assert "nothing to save" in raised.value.why


def test_a_port_in_use_is_named(hosts: Hosts, topology: Topology) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of node 0") as raised:
            start(hosts, topology, config_of(topology), master_port=port)
    assert "in use" in raised.value.why


def test_without_a_python_on_the_node_no_port_is_blamed(hosts: Hosts, topology: Topology) -> None:
    (hosts[0].home / ".micsctl/python").unlink()
    with pytest.raises(MicsctlError) as raised:
        start(hosts, topology, config_of(topology))
    assert "port" not in raised.value.what


def test_a_run_that_starts_on_some_nodes_only_is_ended(
    hosts: Hosts, topology: Topology, trainer: Callable[[str], None]
) -> None:
    """The second node cannot write: the first must not hold its devices and wait for it."""
    trainer("time.sleep(600)\n")
    config = config_of(topology)
    (hosts[1].home / f".micsctl/runs/{config.run_id}/pid").mkdir(parents=True)
    with pytest.raises(MicsctlError, match="node 1"):
        start(hosts, topology, config)
    assert processes_with(f"MICS_RUN_ID={config.run_id}") == []
    assert list_runs(hosts[:1])[0].status is not Status.RUNNING


def test_the_log_of_a_rank_is_on_the_node_that_has_it(hosts: Hosts, topology: Topology) -> None:
    """Ranks are given out in the order of the topology, which need not be the order of the nodes."""
    for host, local in ((hosts[0], 0), (hosts[1], 0)):
        host.write(f".micsctl/runs/0101-000000-mics-aaaa/ranks/x/attempt_0/{local}/stdout.log", f"on {host.index}\n")
    config = replace(config_of(topology), node_order=(1, 0))
    lines: list[str] = []
    rank_log(hosts, Run(config.run_id, config, (), None, None), 2, lines.append)
    assert lines == ["on 0"]
    assert RunConfig.from_json(config.to_json()) == config


def test_code_is_shipped_once(hosts: Hosts) -> None:
    package = resources.trainer()
    name = code.content_hash(package)
    code.ship(hosts[0], package, name)
    marker = hosts[0].home / f".micsctl/code/{name}/mics/__init__.py"
    marker.write_text("changed")
    code.ship(hosts[0], package, name)
    assert marker.read_text() == "changed"


def test_the_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = code.content_hash(tmp_path)
    (tmp_path / "a.py").write_text("2")
    second = code.content_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, code.content_hash(tmp_path)}) == 3


def test_start_script_is_valid_shell(topology: Topology) -> None:
    script = start_script(config_of(topology), topology, 1, port=29500, code_hashes=("abc", "def"))
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=10).returncode == 0
    assert 'PYTHONPATH="$HOME/.micsctl/code/abc:$HOME/.micsctl/code/def"' in script  # the trainer's own comes first
    assert "--node-rank=1 " in script
    assert "--master-addr=127.0.0.1 " in script
    assert "--local-addr=127.0.0.2 " in script


def test_traffic_is_read_at_the_interface_only_where_every_node_has_its_own(topology: Topology) -> None:
    chosen = plan(TrainConfig(), machines_from(topology))
    assert configure(chosen, topology, "0101-000000-mics-aaaa").interface is None
    apart = Topology(tuple(replace(node, interface="eth0") for node in topology.nodes))
    assert configure(chosen, apart, "0101-000000-mics-aaaa").interface == "eth0"
    efa = Topology(tuple(replace(node, efa_devices=("rdmap0s6",)) for node in apart.nodes))
    assert configure(chosen, efa, "0101-000000-mics-aaaa").interface is None


def test_environment_sets_no_efa_switches(topology: Topology) -> None:
    gpu = replace(topology.nodes[0], nvlinks=((0, 12), (12, 0)), interface="ens32")
    assert environment(gpu)["NCCL_SOCKET_IFNAME"] == "ens32"
    assert not [key for key in environment(gpu) if key.startswith(("FI_", "NCCL_PROTO", "NCCL_ALGO", "RDMAV"))]
    assert environment(replace(gpu, nvlinks=()))["NCCL_SOCKET_IFNAME"] == "ens32"  # its driver gives no table of links
    assert environment(topology.nodes[0])["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_ranks_have_the_users_model_and_the_environment_of_their_node(
    hosts: Hosts, topology: Topology, trainer: Callable[[str], None], tmp_path: Path
) -> None:
    package = tmp_path / "beside" / "my_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "tiny.py").write_text(
        "from pathlib import Path\nWIDTH = Path(__file__).with_name('width').read_text()\n"
    )
    (package / "width").write_text("64")
    names = ("AWS_ENDPOINT_URL", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "MICS_SHARED")
    logins = [LocalHost(host.index, host.home, {name: f"{name} {host.index}" for name in names}) for host in hosts]
    trainer(
        "from my_models.tiny import WIDTH\n"
        "names = [n for n in os.environ if n.startswith(('AWS_', 'MICS_SHARED', 'TORCH_'))]\n"
        "seen = {name: os.environ[name] for name in names} | {'width': WIDTH, 'nccl': os.path.isdir('nccl')}\n"
        "open(folder + f'/seen{rank}', 'w').write(json.dumps(seen))\n"
    )
    config = config_of(topology)
    start(logins, topology, config, own_code=package)
    follow(logins, config.run_id, Seen(), poll_seconds=0.2)
    for rank in range(4):
        host, folder = logins[rank // 2], logins[rank // 2].home / f".micsctl/runs/{config.run_id}"
        seen = json.loads((folder / f"seen{rank}").read_text())
        assert {name: seen[name] for name in names} == dict(host.login)
        assert (seen["width"], seen["nccl"]) == ("64", True)
        assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert seen["TORCH_FR_DUMP_TEMP_FILE"] == seen["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == f"{folder}/nccl/rank"
        assert int(seen["TORCH_FR_BUFFER_SIZE"]) > 0


def test_the_users_model_lies_beside_the_file_or_on_the_nodes(tmp_path: Path) -> None:
    def found(model: str) -> Path | None:
        return code.own_code(TrainConfig(model=model), tmp_path)

    (tmp_path / "folder").mkdir()
    (tmp_path / "module.py").write_text("")
    assert found("folder.models.gpt:build") == tmp_path / "folder"
    assert found("module:build") == tmp_path / "module.py"
    for model in ("installed.models:build", "gpt-3m", "hf:folder", "hf:module"):
        assert found(model) is None
    large = tmp_path / "folder" / "data.bin"
    with large.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UsageError, match="too large"):
        found("folder.models.gpt:build")


def test_a_module_of_one_file_is_shipped_under_its_name(hosts: Hosts, tmp_path: Path) -> None:
    module = tmp_path / "my_model.py"
    module.write_text("x = 1\n")
    name = code.content_hash(module)
    code.ship(hosts[0], module, name)
    assert (hosts[0].home / f".micsctl/code/{name}/my_model.py").read_text() == "x = 1\n"
    module.write_text("x = 2\n")
    assert code.content_hash(module) != name


def test_what_is_left_out_on_the_way_does_not_change_the_hash(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = code.content_hash(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.cpython-311.pyc").write_bytes(b"x")
    assert code.content_hash(tmp_path) == before


def test_run_json_names_the_nodes_by_their_index(topology: Topology) -> None:
    chosen = plan(TrainConfig(), machines_from(topology))
    other_way_round = Topology(topology.nodes[::-1])
    config = configure(chosen, other_way_round, "0101-000000-mics-aaaa")
    assert (config.node_order, config.node_names) == ((1, 0), ("i-0", "i-1"))
    gap = Topology((replace(topology.nodes[0], index=2), topology.nodes[1]))
    assert configure(chosen, gap, "0101-000000-mics-aaaa").node_names == ("", "i-1", "i-0")


@pytest.mark.parametrize(
    ("device", "changes", "seconds"),
    [
        ("NVIDIA A100", {"partition": 4}, 60.0),
        ("CPU process", {"partition": 4}, 0.0),  # seconds on emulated links say nothing
        ("NVIDIA A100", {"partition": 4, "hierarchical": True}, 0.0),  # somebody has decided
        ("NVIDIA A100", {"partition": 2}, 0.0),
        ("NVIDIA A100", {"strategy": "zero3"}, 0.0),
    ],
)
def test_hierarchical_is_tried_first_where_nobody_has_decided(
    topology: Topology, device: str, changes: dict[str, Any], seconds: float
) -> None:
    devices = tuple(Device(i, device, 40 << 30, None) for i in range(2))
    there = Topology(tuple(replace(node, devices=devices) for node in topology.nodes))
    asked = TrainConfig(**changes)
    assert trial_seconds(asked, plan(asked, machines_from(there))) == seconds


def failure(**changes: Any) -> str:
    account = {"rank": 0, "local_rank": 0, "exit_code": 1, "at_seconds": 100, "pid": 1}
    return json.dumps(account | changes)


def test_a_kill_from_outside_is_the_cause_even_when_peers_noticed_earlier(hosts: Hosts) -> None:
    hosts[0].write(".micsctl/runs/r/failure.json", failure(rank=1, at_seconds=100))
    hosts[1].write(".micsctl/runs/r/failure.json", failure(rank=3, at_seconds=101, exit_code=-9))
    found = first_failure(hosts, "r")
    assert found
    assert (found.rank, found.node) == (3, "node 1 (i-1)")


def test_an_abort_over_a_broken_connection_is_no_kill_from_outside(hosts: Hosts) -> None:
    hosts[0].write(".micsctl/runs/r/failure.json", failure(rank=1, at_seconds=101, exit_code=-6))
    hosts[1].write(".micsctl/runs/r/failure.json", failure(rank=3, at_seconds=100, exit_code=1))
    found = first_failure(hosts, "r")
    assert found
    assert found.rank == 3


def test_the_reason_of_a_refusal_is_found_whoever_is_named_first(hosts: Hosts) -> None:
    """All ranks refuse, the first of each node says why, and torchrun may notice another one."""
    for host, rank in zip(hosts, (1, 3), strict=True):
        host.write(".micsctl/runs/r/failure.json", failure(rank=rank, local_rank=1, exit_code=2))
        host.write(".micsctl/runs/r/ranks/x/attempt_0/0/stderr.log", "mics: the corpus is too short\n")
        host.write(".micsctl/runs/r/ranks/x/attempt_0/1/stderr.log", "")
    found = first_failure(hosts, "r")
    assert found
    assert found.last_lines == "mics: the corpus is too short"


def test_a_killed_rank_is_not_given_the_words_of_another(hosts: Hosts) -> None:
    hosts[1].write(".micsctl/runs/r/failure.json", failure(rank=3, local_rank=1, exit_code=-9))
    hosts[1].write(".micsctl/runs/r/ranks/x/attempt_0/0/stderr.log", "connection closed by peer\n")
    found = first_failure(hosts, "r")
    assert found
    assert found.last_lines == ""


@pytest.mark.parametrize(
    ("code_", "words"),
    [(-9, "killed by SIGKILL"), (-int(signal.SIGSEGV), "SIGSEGV"), (1, "exit code 1"), (-99, "signal 99")],
)
def test_how_a_rank_ended_in_words(code_: int, words: str) -> None:
    assert words in how_it_ended(Failure(0, 0, "node 0", code_, 0.0, ""))


@pytest.mark.parametrize("text", ["$(reboot)", "../x", "", "0101-000000-mics;ls", "0101-000000-", "x" * 9])
def test_a_run_id_from_the_command_line_cannot_carry_a_command(text: str) -> None:
    with pytest.raises(UsageError):
        checked_run_id(text)


def test_run_ids_are_accepted_back_and_differ() -> None:
    ids = {new_run_id("mics-flat") for _ in range(3)}  # few: within one second 16 random bits tell them apart
    assert len(ids) == 3
    assert all(checked_run_id(run_id) == run_id and re.match(r"\d{4}-\d{6}-mics-flat-", run_id) for run_id in ids)
