"""`micsctl demo` from an installed wheel, in a fresh virtual environment, from any folder."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.sandbox]
FIELDS = {
    "ok", "seconds", "level", "shaped", "link_mbps", "nodes", "devices", "partition_size", "loss_first", "loss_last",
    "loss_max_difference", "zero3_step_seconds", "mics_step_seconds", "speedup", "traffic_source",
    "zero3_traffic_bytes", "zero3_traffic_bytes_formula", "mics_traffic_bytes", "mics_traffic_bytes_formula",
    "resumed_step", "leftovers",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("micsctl-*.whl"))


def environment(wheel: Path, folder: Path, python: str) -> Path:
    """A virtual environment with the wheel; what the wheel depends on is borrowed from this one."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    site = next(folder.glob("lib/python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, timeout=120)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("venv") / "venv", sys.executable)


@pytest.fixture(scope="module")
def ordinary(wheel: Path) -> Iterator[tuple[Path, int]]:
    """A folder of an ordinary user with an environment that he can run, and his uid."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not os.access(python, os.X_OK):
        pytest.skip(f"an ordinary user cannot reach this interpreter, and {python} is not there")
    uid = next((user.pw_uid for user in pwd.getpwall() if 1000 <= user.pw_uid < 60000), 65534)
    folder = Path(f"/var/tmp/micsctl-demo-{os.getpid()}")  # pytest's own folders are closed to others
    folder.mkdir(mode=0o755)
    environment(wheel, folder / "venv", python)
    (folder / "home").mkdir()
    os.chown(folder / "home", uid, uid)
    yield folder, uid
    shutil.rmtree(folder)


def test_the_wheel_adds_only_its_two_packages(installed: Path) -> None:
    names = {path.name for path in next(installed.glob("lib/python*/site-packages")).iterdir()}
    own = {name for name in names if not name.endswith((".dist-info", ".pth")) and name not in ("bin", "__pycache__")}
    assert own == {"micsctl", "mics"}


def run(venv: Path, cwd: Path, *arguments: str, uid: int | None = None) -> subprocess.CompletedProcess[str]:
    become = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return subprocess.run(
        [*become, venv / "bin/python", "-m", "micsctl", *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), "MICSCTL_HOME": str(cwd / "state")},
        capture_output=True,
        text=True,
        timeout=900,
    )


def check(done: subprocess.CompletedProcess[str], cwd: Path) -> dict:  # type: ignore[type-arg]
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == FIELDS
    assert last["ok"] is True
    assert last["loss_last"] <= 0.6 * last["loss_first"]
    assert last["loss_max_difference"] <= 1e-4
    assert (last["nodes"], last["devices"], last["partition_size"], last["resumed_step"]) == (4, 2, 2, 11)
    assert last["leftovers"] == 0
    assert "<svg" in (cwd / "demo/report.html").read_text()
    return last  # type: ignore[no-any-return]


@pytest.mark.timeout(1000)
def test_init_and_demo_from_any_folder(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "init").returncode == 0
    last = check(run(installed, tmp_path, "demo"), tmp_path)
    if os.geteuid() == 0:
        assert (last["level"], last["shaped"], last["traffic_source"]) == ("netns", True, "interface")
        for strategy in ("zero3", "mics"):
            formula = last[f"{strategy}_traffic_bytes_formula"]
            assert last[f"{strategy}_traffic_bytes"] == pytest.approx(formula, rel=0.02)


@pytest.mark.timeout(1000)
def test_demo_as_an_ordinary_user(ordinary: tuple[Path, int]) -> None:
    folder, uid = ordinary
    done = run(folder / "venv", folder / "home", "demo", uid=uid)
    last = check(done, folder / "home")
    assert (last["level"], last["shaped"], last["link_mbps"]) == ("process", False, None)
    assert "without shaping, bytes are counted" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("after", ["sandbox ", "wait until", "start run", "step 1/", "step 3/"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, after: str) -> None:
    """Interrupted at several points, told by what was printed last; twice, as impatient people do."""
    command = [Path(sys.executable).with_name("micsctl"), "demo"]
    state = {"MICSCTL_HOME": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
    demo = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, **state}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert demo.stdout
    for line in demo.stdout:
        if after in line:
            break
    demo.send_signal(signal.SIGINT)
    time.sleep(0.5)
    demo.send_signal(signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.wait(timeout=60) == 130, rest
    assert "Traceback" not in rest
    assert not (tmp_path / "state/demo/sandbox").exists()
    still = subprocess.run(["pgrep", "-af", str(tmp_path)], capture_output=True, text=True, timeout=10).stdout
    assert still == ""
