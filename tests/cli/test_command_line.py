"""The installed `micsctl`, as a user types it. No cluster is needed here."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

MICSCTL = Path(sys.executable).with_name("micsctl")
ROOT = Path(__file__).parents[2]


def micsctl(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MICSCTL, *arguments],
        cwd=cwd,
        env={**os.environ, "MICSCTL_HOME": str(cwd / "home"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_help_is_quick() -> None:
    """Within 0.25 s of processor time (the clock on the wall is shared with other tests); the best of several."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([MICSCTL, "--help"], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds: list[float] = []
    while len(seconds) < 40 and (not seconds or min(seconds) > 0.25):
        seconds.append(once())
    assert min(seconds) <= 0.25


def test_nothing_heavy_is_imported_at_start() -> None:
    code = "import sys, micsctl.cli.app as a; a.build(); print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    heavy = {"torch", "boto3", "botocore", "fabric", "paramiko", "moto", "matplotlib", "pydantic", "rich", "jinja2"}
    assert heavy.isdisjoint(loaded.stdout.split())


def test_init_writes_a_file_that_plan_reads(tmp_path: Path) -> None:
    assert micsctl("init", cwd=tmp_path).returncode == 0
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    made = micsctl("plan", "--json", cwd=below)
    assert made.returncode == 0, made.stderr
    plan = json.loads(made.stdout)
    assert plan["partition_size"] == 2
    assert plan["reason"]
    assert [key for key, value in plan["train"].items() if value == "auto"] == ["mask_token"]  # the trainer's to know


def test_init_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "mics.yaml").write_text("name: mine\n")
    refused = micsctl("init", cwd=tmp_path)
    assert refused.returncode == 2
    assert (tmp_path / "mics.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {modle: gpt-3m}", "did you mean 'model'"),
        ("train: {partition: 3}", "does not divide the world size 8"),
        ("train: {lr: fast}", "train.lr"),
        ("name: [", "not valid YAML"),
        ("cluster: {type: m5.large}\nprovider: aws", "m5.large"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mics.yaml").write_text(text)
    refused = micsctl("plan", cwd=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    as_json = micsctl("plan", "--json", cwd=tmp_path)
    assert json.loads(as_json.stdout)["error"]["exit_code"] == 2


def test_lr_1e_4_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "mics.yaml").write_text("train:\n  lr: 1e-4\n")
    assert json.loads(micsctl("plan", "--json", cwd=tmp_path).stdout)["train"]["lr"] == 1e-4


def test_a_missing_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    refused = micsctl("plan", "-c", "nowhere.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "nowhere.yaml" in refused.stderr


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    (tmp_path / "mics.yaml").write_text("name: from-file\n")
    for arguments, environment, expected in (
        ((), {}, "from-file"),
        ((), {"MICSCTL_NAME": "from-env"}, "from-env"),
        (("-n", "from-flag"), {"MICSCTL_NAME": "from-env"}, "from-flag"),
    ):
        shown = micsctl("up", "--dry-run", "--json", *arguments, cwd=tmp_path, **environment)
        assert json.loads(shown.stdout)["name"] == expected, shown.stderr
    micsctl("sandbox", "stop", cwd=tmp_path)


def test_a_wrong_command_line_is_usage(tmp_path: Path) -> None:
    refused = micsctl("up", "--nonsense", "--json", cwd=tmp_path)
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["ok"] is False


def test_exit_codes_are_documented() -> None:
    from micsctl.errors import ExitCode

    helped = subprocess.run([MICSCTL, "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert {int(n) for n in re.findall(r"\b(\d+) [a-zC]", helped)} >= {int(code) for code in ExitCode}
    readme = (ROOT / "README.md").read_text()
    assert all(re.search(rf"\| {int(code)} \|", readme) for code in ExitCode)
