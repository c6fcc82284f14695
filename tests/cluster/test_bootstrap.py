"""The real user data, run as the login user itself: what a node of the process level does."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from micsctl.cluster.bootstrap import USER_DATA_LIMIT_BYTES, render_bootstrap

USER = pwd.getpwuid(os.getuid()).pw_name
# as the login user the script stays in HOME; root with another login user would change this machine
LATER = datetime.now(UTC) + timedelta(hours=1)


@dataclass
class Node:
    """A home folder, and programs that stand for those of the machine."""

    home: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)

    def bootstrap(self, *, ends_at: datetime = LATER, check_seconds: float = 0.1) -> None:
        """Until `ready` is written."""
        self.user_data(ends_at=ends_at, check_seconds=check_seconds)
        deadline = time.monotonic() + 30
        while not self.file("ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def user_data(self, *, ends_at: datetime = LATER, check_seconds: float = 0.1) -> None:
        """Until the script ends, as cloud-init waits for it."""
        script = render_bootstrap(cluster="demo", ssh_user=USER, ends_at=ends_at, check_seconds=check_seconds)
        environment = {
            "HOME": str(self.home),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "MICSCTL_PYTHON": sys.executable,
        }
        subprocess.run(
            ["bash", "-c", script],
            env=environment | self.environment,
            cwd=self.home,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def program(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @contextmanager
    def watching(self, original_end: int) -> Iterator[None]:
        """A further watcher, with another original end."""
        arguments = [self.file("end.sh"), self.file("ends_at"), str(original_end), "0.02"]
        environment = {"HOME": str(self.home), "PATH": f"{self.programs}:{os.environ['PATH']}"}
        with subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as watcher:
            try:
                yield
            finally:
                watcher.kill()

    def file(self, name: str) -> Path:
        return self.home / ".micsctl" / name

    def watchers(self) -> set[int]:
        """Sessions of this node that look at its end. (Their bash forks, so its processes come and go.)"""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                if str(self.file("end.sh")).encode() in arguments:
                    found.add(os.getsid(int(folder.name)))
        return found - {os.getsid(0)}

    def shut_down(self, *, within_seconds: float = 5) -> bool:
        deadline = time.monotonic() + within_seconds
        while not self.file("shutdown").exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return self.file("shutdown").read_text().startswith("-h now\n")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    home, programs = tmp_path / "it's a $home", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()
    made = Node(home, programs)
    made.program("shutdown", 'echo "$@" >>"$HOME/.micsctl/shutdown"')
    made.program("apt-get", 'echo "apt-get $*"; exit 100')
    yield made
    deadline = time.monotonic() + 5
    while sessions := made.watchers():
        assert time.monotonic() < deadline
        for session in sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        time.sleep(0.01)


def test_a_node_has_what_the_architecture_promises(node: Node) -> None:
    node.bootstrap()
    log = node.file("bootstrap.log").read_text()
    assert node.file("ready").read_text() == "ok\n", log
    assert node.file("ends_at").read_text() == f"{int(LATER.timestamp())}\n"
    code = "import sys; from importlib.metadata import version; print(sys.argv[1], version('torch'))"
    command = [node.file("python"), "-c", code, "two words"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout.startswith("two words 2.")
    assert len(node.watchers()) == 1
    assert not node.file("shutdown").exists()


def test_running_again_keeps_the_end_and_one_watcher(node: Node) -> None:
    node.bootstrap()
    extended = f"{int(LATER.timestamp()) + 7200}\n"
    node.file("ends_at").write_text(extended)
    before = node.watchers()
    node.bootstrap()
    time.sleep(0.3)
    assert node.file("ready").read_text() == "ok\n"
    assert node.file("ends_at").read_text() == extended
    assert node.watchers() == before


def test_the_node_ends_itself_when_its_time_is_up(node: Node) -> None:
    node.bootstrap(ends_at=datetime.now(UTC) + timedelta(seconds=2))
    assert node.shut_down()


def test_extending_keeps_it_alive_and_shortening_ends_it(node: Node) -> None:
    node.bootstrap()
    node.file("ends_at").write_text(str(int(time.time()) - 5))  # no newline, as an editor may leave it
    assert node.shut_down()


def test_a_garbled_end_neither_kills_nor_keeps_the_node(node: Node) -> None:
    node.bootstrap(check_seconds=60)
    now = int(time.time())
    for content in ["", "tomorrow\n", "-5\n", "0\n", "1\x002\n", "179999\n", "99999999999999\n", "1;shutdown\n", None]:
        node.file("ends_at").unlink(missing_ok=True)
        node.file("shutdown").unlink(missing_ok=True)
        if content is not None:
            node.file("ends_at").write_text(content)
        with node.watching(original_end=now + 300):
            assert not node.shut_down(within_seconds=0.1), content
        with node.watching(original_end=now - 1):
            assert node.shut_down(), content


def test_a_failure_is_what_ready_says(node: Node) -> None:
    node.environment["MICSCTL_PYTHON"] = "/nonexistent"
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        node.program(name, "exit 1")
    node.bootstrap()
    ready = node.file("ready").read_text()
    assert ready.startswith("making a virtual environment failed (exit 1)"), ready
    assert "no Python 3.11 or newer" in ready
    assert ready.count("\n") == 1
    assert len(node.watchers()) == 1  # a node that cannot train must still end


def test_host_keys_do_not_wait_for_torch(node: Node) -> None:
    """cloud-init shows them after the user data; a venv that takes long must not hold them, nor cloud-init's output."""
    node.environment["MICSCTL_PYTHON"] = "/nonexistent"
    pip = 'mkdir -p "$3/bin"; printf "#!/bin/sh\n" >"$3/bin/python"; chmod +x "$3/bin/python"'
    wait = 'while [ ! -e "$HOME/go" ]; do sleep 0.05; done'
    node.program("python3.13", f"case $1 in -c) exit 0;; -m) {wait}; {pip};; esac")
    node.user_data(check_seconds=1)  # subprocess.run waits until nobody holds the output
    node.user_data(check_seconds=1)
    time.sleep(0.2)
    assert not node.file("ready").exists()
    (node.home / "go").touch()
    deadline = time.monotonic() + 10
    while not node.file("ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert node.file("ready").read_text() == "ok\n"
    assert node.file("python").exists()
    time.sleep(0.3)  # the second one finds all done
    assert node.file("bootstrap.log").read_text().count("Python with torch: ") == 2


def test_a_python_without_the_right_torch_is_passed_over(node: Node) -> None:
    """It goes on to a virtual environment of its own, and installs exactly one torch."""
    node.environment["MICSCTL_PYTHON"] = str(node.programs / "old-python")
    node.program("old-python", "exit 1")
    fake_pip = (
        'mkdir -p "$3/bin"; printf \'#!/bin/sh\\necho "pip: $*"; exit 3\\n\' >"$3/bin/python"; chmod +x "$3/bin/python"'
    )
    node.program("python3.13", f"case $1 in -c) exit 0;; -m) {fake_pip};; esac")
    node.program("sleep", "[ $1 != 1 ] || exec /bin/sleep 1")
    node.bootstrap(check_seconds=1)
    assert node.file("ready").read_text().startswith("installing torch 2.13.0 failed")
    assert node.file("bootstrap.log").read_text().count("torch==2.13.0 numpy") == 5


def own_python(node: Node, pip: str) -> Path:
    """An own virtual environment that is there already, with torch and without boto3; `pip` is what its pip does."""
    node.environment["MICSCTL_PYTHON"] = "/nonexistent"
    folder = node.file("venv/bin")
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -) exit 0;; -c) exit 1;; -m) echo "$@" >>"$HOME/pip"; {pip};; esac\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(("pip", "said"), [("true", 0), ("exit 1", 1)])
def test_s3_is_provided_and_a_node_without_it_goes_on(node: Node, pip: str, said: int) -> None:
    python = own_python(node, pip)
    node.bootstrap()
    assert node.file("ready").read_text() == "ok\n"
    assert str(python).split("/")[-4] in node.file("python").read_text()
    assert "boto3 smart_open" in (node.home / "pip").read_text()
    assert node.file("bootstrap.log").read_text().count("s3:// will be refused") == said


def test_nothing_is_installed_into_a_python_of_somebody_elses_machine(node: Node) -> None:
    python = own_python(node, "true")
    node.environment["MICSCTL_PYTHON"] = str(python)
    node.bootstrap()
    assert node.file("ready").read_text() == "ok\n"
    assert not (node.home / "pip").exists()


def test_the_text_is_small_valid_and_complete() -> None:
    script = render_bootstrap(cluster="demo", ssh_user="ubuntu", ends_at=LATER)
    assert len(script.encode()) < USER_DATA_LIMIT_BYTES // 2
    assert "{{" not in script
    assert "check_seconds=60\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, timeout=10, check=True)


def test_a_missing_value_is_an_error() -> None:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from micsctl import resources

    environment = Environment(loader=FileSystemLoader(resources.templates()), undefined=StrictUndefined)
    environment.filters["quote"] = str
    with pytest.raises(UndefinedError):
        environment.get_template("bootstrap.sh.j2").render(cluster="demo")
