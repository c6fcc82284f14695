"""Other programs than the trainer, as runs like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from mics.config import RunConfig, TrainConfig

from micsctl import resources
from micsctl.bench.compare import model_of
from micsctl.bench.job import has_deepspeed, prepare, run, site_of, train_config
from micsctl.errors import JobError, UsageError
from micsctl.runs.launch import start_script
from micsctl.runs.state import list_runs
from micsctl.topology.model import Topology

from .conftest import LocalHost, processes_with

PRELUDE = "import json, os, sys, time\nrank, folder = int(os.environ['RANK']), os.path.dirname(sys.argv[2])\n"
WRITES = """
if rank == 0:
    asked = json.load(open(folder + '/probe.json'))
    with open(folder + '/metrics.jsonl', 'w') as file:
        for step in range(1, 3):
            print(json.dumps({'step': step, 'asked': asked['word']}), file=file, flush=True)
"""


class Seen:
    def __init__(self, *, stops: bool = False) -> None:
        self.lines: list[dict[str, Any]] = []
        self.stops = stops

    def metrics(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.stops:
            raise BrokenPipeError

    def output(self, line: str) -> None: ...


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a program `mics.probe` to the trainer that is shipped."""

    def put(body: str) -> None:
        package = tmp_path / "code" / "mics"
        shutil.copytree(resources.trainer(), package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / "probe.py").write_text(PRELUDE + body)
        monkeypatch.setattr(resources, "trainer", lambda: package)

    return put


def measured(hosts: list[LocalHost], topology: Topology, watcher: Seen) -> list[dict[str, Any]]:
    config = prepare(model_of("gpt-3m"), topology, measurements=2)
    return run(
        hosts, topology, config, program="mics.probe", files={"probe.json": '{"word": "hello"}'}, watcher=watcher
    )


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_program_finds_its_file_and_its_lines_come_back(hosts: Any, topology: Topology, put: Any) -> None:
    put(WRITES)
    seen = Seen()
    found = measured(hosts, topology, seen)
    assert found == [{"step": 1, "asked": "hello"}, {"step": 2, "asked": "hello"}]
    assert seen.lines == found
    [listed] = list_runs(hosts)
    assert listed.run_id.split("-")[2] == "bench"
    assert (listed.last_step, listed.config.train.steps) == (2, 2)  # what `micsctl runs` shows


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_what_ends_the_watching_ends_the_run(hosts: Any, topology: Topology, put: Any) -> None:
    put(WRITES + "time.sleep(600)\n")
    with pytest.raises(BrokenPipeError):
        measured(hosts, topology, Seen(stops=True))
    assert processes_with(f"MICS_RUN_ID={list_runs(hosts)[0].run_id}") == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_failure_names_its_log_and_no_checkpoint(hosts: Any, topology: Topology, put: Any) -> None:
    put("sys.exit('broken')\n")
    with pytest.raises(JobError) as raised:
        measured(hosts, topology, Seen())
    assert raised.value.next == f"micsctl logs {list_runs(hosts)[0].run_id}"


def test_the_program_stands_in_start_sh(topology: Topology) -> None:
    config = prepare(model_of("gpt-3m"), topology, measurements=1)
    for program in ("mics.train", "mics.bench"):
        script = start_script(config, topology, 0, port=1, code_hashes=("abc",), program=program)
        assert f"-m {program} --config" in script


def test_run_json_of_a_benchmark(topology: Topology) -> None:
    train = TrainConfig(model="gpt-3m", strategy="zero3", accumulation=2)
    made = train_config(train, devices_per_node=2, measurements=140)
    assert (made.strategy, made.partition, made.steps, made.checkpoint.every) == ("mics", 2, 140, 0)
    config = prepare(model_of(None), topology, measurements=7)
    assert isinstance(config, RunConfig)
    assert (config.precision, config.micro_batch, config.train.sequence, config.grid.partition_size) == (
        "fp32",
        1,
        64,
        2,
    )


def test_model_of_the_command_line() -> None:
    assert model_of("gpt-3m", TrainConfig(sequence=32, precision="bf16")).sequence == 32  # as mics.yaml says
    assert model_of(None, TrainConfig(sequence=32)).sequence == 64
    assert model_of(None, TrainConfig(sequence=1024, model="gpt2-124m"), default="gpt-3m").sequence == 64
    with pytest.raises(UsageError, match="as mics"):  # longer than its positions
        model_of("gpt-3m", TrainConfig(sequence=1024, model="gpt2-124m"))
    for name in ("gpt-3", "package:factory"):
        with pytest.raises(UsageError, match="is no preset"):
            model_of(name)


def test_where_it_runs_and_what_is_installed(hosts: Any, topology: Topology) -> None:
    site = site_of(hosts, topology, level="process", link_mbps=None)
    assert (site.nodes, site.ranks_per_node, site.mtu_bytes, site.device) == (2, 2, None, "cpu")
    for host in hosts:
        host.home.joinpath(".micsctl/python").write_text("#!/bin/sh\nexit 1\n")
    assert not has_deepspeed(hosts)
    for host in hosts:
        host.home.joinpath(".micsctl/python").write_text("#!/bin/sh\nexit 0\n")
    assert has_deepspeed(hosts)
