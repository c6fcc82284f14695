"""The README's commands, in the installed `micsctl`, on a sandbox: what a user does, in his order."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MICSCTL = Path(sys.executable).with_name("micsctl")
ROOT = Path(__file__).parents[2]
# root walks at both levels, the second time with the slow tests
LEVELS = ["netns", pytest.param("process", marks=pytest.mark.slow)] if os.geteuid() == 0 else ["process"]
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(400)]

CONFIG = """
name: walk
cluster: {{nodes: 2}}
sandbox: {{level: {level}, links: none}}
train: {{steps: 4, accumulation: 1, sequence: 32, checkpoint: {{every: 2}}}}
"""


@dataclass
class Laptop:
    folder: Path
    level: str
    typed: list[str] = field(default_factory=list)

    def __call__(
        self, *arguments: str, code: int | tuple[int, ...] = 0, timeout: float = 180
    ) -> subprocess.CompletedProcess[str]:
        self.typed.append(arguments[0])
        done = subprocess.run(
            [MICSCTL, *arguments],
            cwd=self.folder,
            env={**os.environ, "MICSCTL_HOME": str(self.folder / "home")},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def run(self, run_id: str) -> dict:  # type: ignore[type-arg]
        return next(run for run in json.loads(self("runs", "--json").stdout) if run["run_id"] == run_id)

    def json(self, *arguments: str, code: int = 0) -> dict:  # type: ignore[type-arg]
        return json.loads(self(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="module", params=LEVELS)
def laptop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    folder = tmp_path_factory.mktemp("laptop")
    made = Laptop(folder, request.param)
    made("init")
    (folder / "mics.yaml").write_text(CONFIG.format(level=request.param))
    yield made
    left = json.loads(made("sandbox", "stop", "--json").stdout)
    shutil.rmtree(folder)
    assert left["total"] == 0, left


def test_01_plan_and_dry_run_need_no_cluster(laptop: Laptop) -> None:
    plan = laptop.json("plan")
    assert plan["partition_size"] == 2
    assert laptop.json("up", "--dry-run")["name"] == "walk"


def test_02_commands_before_up_say_what_to_do(laptop: Laptop) -> None:
    for command in ("topology", "launch", "runs"):
        assert laptop.json(command, code=2)["error"]["next"] == "micsctl up"
    assert laptop("status").stdout.startswith("no cluster 'walk'")


def test_03_up_twice_makes_one_cluster(laptop: Laptop) -> None:
    first = laptop.json("up")
    assert [node["state"] for node in first["nodes"]] == ["running", "running"]
    again = laptop.json("up")
    assert [n["instance_id"] for n in again["nodes"]] == [n["instance_id"] for n in first["nodes"]]
    assert laptop.json("status")["cluster"]["nodes"] == first["nodes"]


def test_04_topology_describes_every_node(laptop: Laptop) -> None:
    answer = laptop.json("topology")
    found = answer["topology"]
    assert [f for f in answer["findings"] if f["level"] == "error"] == []
    assert [len(node["devices"]) for node in found["nodes"]] == [2, 2]
    assert all(node["versions"]["torch"].startswith("2.13.0") for node in found["nodes"])
    assert {node["interface"] for node in found["nodes"]} == ({"eth0"} if laptop.level == "netns" else {"lo"})
    assert "worker processes" in laptop("topology").stdout


def test_05_launch_trains_and_leaves_its_records(laptop: Laptop) -> None:
    done = laptop("launch")
    assert "step 4/4" in done.stdout or re.search(r"step +4", done.stdout), done.stdout
    [run] = json.loads(laptop("runs", "--json").stdout)
    assert (run["status"], run["step"]) == ("done", 4)
    assert run["loss"] > 0
    assert run["run_id"] in laptop("runs").stdout
    assert laptop("logs").stdout.strip()
    assert "step" in laptop("logs", "-f").stdout


def test_06_a_run_outlives_its_launcher_is_stopped_and_resumed(laptop: Laptop) -> None:
    text = CONFIG.format(level=laptop.level)
    (laptop.folder / "long.yaml").write_text(text.replace("steps: 4", "steps: 5000"))
    run_id = laptop.json("launch", "--detach", "-c", "long.yaml")["run_id"]
    assert laptop.json("launch", code=2)["error"]["what"].startswith(f"run {run_id} is still going on")
    deadline = time.monotonic() + 120
    while (laptop.run(run_id)["step"] or 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert laptop.json("stop", run_id)["status"] == "stopped"
    still_there = f"grep -lz '^MICS_RUN_ID={run_id}$' /proc/[0-9]*/environ 2>/dev/null; true"
    assert laptop("exec", "--", still_there).stdout == ""
    made = laptop.run(run_id)["step"]
    (laptop.folder / "rest.yaml").write_text(text.replace("steps: 4", f"steps: {made + 2}"))
    laptop("launch", "-c", "rest.yaml", "--resume", run_id)
    resumed = json.loads(laptop("runs", "--json").stdout)[-1]
    assert (resumed["status"], resumed["step"]) == ("done", made + 2)
    assert run_id in resumed["resumed_from"]


def test_06b_a_checkpoint_path_that_nodes_do_not_share_is_refused(laptop: Laptop) -> None:
    if laptop.level == "process":
        pytest.skip("nodes of the process level share this machine's folders")
    text = CONFIG.format(level=laptop.level).replace("checkpoint: {", "checkpoint: {path: /var/tmp/own, ")
    (laptop.folder / "own.yaml").write_text(text)
    refused = laptop("launch", "-c", "own.yaml", code=2)
    assert "checkpoints would be lost with the nodes" in refused.stderr


def test_07_exec_and_ssh_reach_every_node(laptop: Laptop) -> None:
    out = laptop("exec", "echo", "hello").stdout.splitlines()
    assert sorted(out) == ["0: hello", "1: hello"]
    assert laptop("exec", "false", code=8)
    assert laptop("ssh", "1", "--", "echo", "from", "one").stdout.strip() == "from one"
    assert "no node 7" in laptop("ssh", "7", code=2).stderr


def test_08_a_changed_host_key_is_refused(laptop: Laptop) -> None:
    known = next((laptop.folder / "home").rglob("known_hosts"))
    kept = known.read_text()
    entries = [line.split() for line in kept.splitlines()]
    others = [entry[-1] for entry in reversed(entries)]
    swapped = [" ".join([*entry[:-1], other]) for entry, other in zip(entries, others, strict=True)]
    known.write_text("\n".join(swapped) + "\n")
    try:
        refused = laptop("topology", code=1)
        assert "host key" in refused.stderr
    finally:
        known.write_text(kept)


def test_09_extend_moves_the_end(laptop: Laptop) -> None:
    before = laptop("exec", "cat", ".micsctl/ends_at").stdout.split()[1]
    laptop("extend", "2d")
    after = laptop("exec", "cat", ".micsctl/ends_at").stdout.split()[1]
    assert int(float(after)) > int(float(before))
    assert laptop("extend", "soon", code=2)


def test_10_the_sandbox_tells_of_itself_and_breaks_on_request(laptop: Laptop) -> None:
    told = laptop.json("sandbox", "status")
    assert told["level"] == laptop.level
    assert "secret" not in json.dumps(told)
    laptop("sandbox", "fault", "DescribeInstances", "UnauthorizedOperation", "--times", "1")
    assert laptop.json("status", code=4)["error"]["what"]
    laptop("sandbox", "fault", "--clear")
    assert "no faults" in laptop("sandbox", "fault").stdout


def test_11_down_proves_that_nothing_is_left(laptop: Laptop) -> None:
    assert "nothing is left" in laptop("down").stdout
    assert "no cluster" in laptop("status").stdout
    assert "nothing is left" in laptop("down").stdout


def test_12_no_capacity_is_a_table_of_reasons_and_costs_nothing(laptop: Laptop) -> None:
    laptop("sandbox", "fault", "RunInstances", "InsufficientInstanceCapacity")
    refused = laptop("up", code=3)
    assert "InsufficientInstanceCapacity" in refused.stderr
    assert "nothing costs money" in refused.stderr
    laptop("sandbox", "fault", "--clear")


def test_13_every_command_of_the_readme_was_typed(laptop: Laptop) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = set(re.findall(r"^micsctl ([a-z]+)", "\n".join(blocks), re.M))
    assert commands <= set(laptop.typed)
