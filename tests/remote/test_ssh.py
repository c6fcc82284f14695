"""SshHost against real sshds: trust, commands, streams, files, and the way through the head."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from micsctl.cluster.model import Cluster, Node
from micsctl.errors import UsageError
from micsctl.home import ClusterFiles
from micsctl.remote import copy, fanout
from micsctl.remote.channel import execute
from micsctl.remote.host import Host, HostError, HostKeyError, LoginError
from micsctl.remote.hostkeys import HostKey
from micsctl.remote.ssh import is_transient, open_host, open_hosts, ssh_command, try_connect

from .conftest import Fleet, free_port, make_fleet, make_key


@pytest.fixture
def host(direct: Fleet) -> Iterator[Host]:
    with open_hosts(direct.cluster, direct.files) as hosts:
        yield hosts[0]


@pytest.fixture
def behind(chained: Fleet) -> Iterator[Host]:
    """Node 1, reached through the head."""
    with open_host(chained.cluster, chained.files, chained.cluster.nodes[1]) as host:
        yield host


def other_key(folder: Path) -> HostKey:
    make_key(folder / "other")
    algorithm, body, *_ = (folder / "other.pub").read_text().split()
    return HostKey(algorithm, body)


def with_files(fleet: Fleet, folder: Path) -> Fleet:
    """The same machines with a laptop folder of their own, to spoil."""
    files = ClusterFiles(folder / "laptop")
    files.folder.mkdir()
    for name in ("id_ed25519", "known_hosts"):
        (files.folder / name).write_bytes((fleet.files.folder / name).read_bytes())
        (files.folder / name).chmod(0o600)
    return replace(fleet, files=files)


# trust


def test_an_unknown_host_key_is_refused(direct: Fleet, tmp_path: Path) -> None:
    fleet = with_files(direct, tmp_path)
    fleet.files.known_hosts.write_text("")
    with pytest.raises(HostKeyError) as caught:
        try_connect(fleet.cluster, fleet.files, fleet.cluster.head)
    assert "node 0 (i-0000)" in caught.value.what
    assert str(fleet.files.known_hosts) in caught.value.why
    assert caught.value.next
    assert not is_transient(caught.value)
    assert fleet.files.known_hosts.read_text() == ""


def test_a_changed_host_key_is_refused(direct: Fleet, tmp_path: Path) -> None:
    fleet = with_files(direct, tmp_path)
    fleet.trust(other_key(tmp_path))
    before = fleet.files.known_hosts.read_text()
    with pytest.raises(HostKeyError, match="not the expected one") as caught:
        try_connect(fleet.cluster, fleet.files, fleet.cluster.head)
    assert caught.value.why.count("SHA256:") == 2
    assert str(fleet.files.known_hosts) in caught.value.why
    assert not is_transient(caught.value)
    assert fleet.files.known_hosts.read_text() == before


def test_host_keys_behind_the_head_are_checked_too(chained: Fleet, tmp_path: Path) -> None:
    fleet = with_files(chained, tmp_path)
    head, _, last = (sshd.host_key for sshd in fleet.sshds)
    fleet.trust(head, other_key(tmp_path), last)
    with open_hosts(fleet.cluster, fleet.files) as hosts:
        with pytest.raises(HostKeyError, match="node 1"):
            hosts[1].run("true")
        assert hosts[2].run("echo fine").stdout == "fine\n"


def test_the_users_own_known_hosts_does_not_count(
    direct: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = with_files(direct, tmp_path)
    (tmp_path / ".ssh").mkdir()
    fleet.files.known_hosts.rename(tmp_path / ".ssh" / "known_hosts")
    fleet.files.known_hosts.write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(HostKeyError):
        try_connect(fleet.cluster, fleet.files, fleet.cluster.head)
    argv = ssh_command(fleet.cluster, fleet.files, fleet.cluster.head)
    answer = subprocess.run([*argv, "true"], capture_output=True, text=True, timeout=20, check=False)
    assert answer.returncode == 255
    assert "Host key verification failed" in answer.stderr


def test_a_key_that_the_node_does_not_take(direct: Fleet, tmp_path: Path) -> None:
    fleet = with_files(direct, tmp_path)
    fleet.files.key.unlink()
    make_key(fleet.files.key)
    with pytest.raises(LoginError, match="refuses the login") as caught:
        try_connect(fleet.cluster, fleet.files, fleet.cluster.head)
    assert not is_transient(caught.value)


def test_a_laptop_without_the_key(direct: Fleet, tmp_path: Path) -> None:
    for name in ("key", "known_hosts"):
        fleet = with_files(direct, tmp_path / name) if (tmp_path / name).mkdir() is None else direct
        getattr(fleet.files, name).unlink()
        with pytest.raises(UsageError, match="this laptop does not have"), open_hosts(fleet.cluster, fleet.files):
            pass


def test_damaged_files_are_a_usage_error(direct: Fleet, tmp_path: Path) -> None:
    fleet = with_files(direct, tmp_path)
    fleet.files.key.write_text("not a key")
    with pytest.raises(UsageError, match="cannot read the SSH files"), open_hosts(fleet.cluster, fleet.files):
        pass


# reaching


def test_a_closed_port_is_transient_and_names_node_and_address(direct: Fleet) -> None:
    cluster = replace(direct.cluster, ssh_port=free_port(("127.0.0.1",)))
    with pytest.raises(HostError, match=r"node 0 \(i-0000\) at \[127\.0\.0\.1\]:\d+") as caught:
        try_connect(cluster, direct.files, cluster.head)
    assert "refused" in caught.value.why
    assert is_transient(caught.value)


def test_a_silent_port_times_out(direct: Fleet) -> None:
    with socket.socket() as silent:  # accepts into its backlog and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        cluster = replace(direct.cluster, ssh_port=silent.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(HostError) as caught:
            try_connect(cluster, direct.files, cluster.head, connect_timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    assert is_transient(caught.value)


def test_a_node_that_the_head_cannot_reach(chained: Fleet) -> None:
    missing = replace(chained.cluster.nodes[1], private_ip="127.0.0.99")
    cluster = replace(chained.cluster, nodes=(chained.cluster.head, missing))
    with pytest.raises(HostError, match=r"node 1 .*127\.0\.0\.99") as caught:
        try_connect(cluster, chained.files, missing)
    assert "through the head" in caught.value.why
    assert is_transient(caught.value)


def test_a_head_that_forwards_nothing_is_no_transient_error(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, ("127.0.0.5", "127.0.0.6"), head_is_public=True, options=("AllowTcpForwarding no",))
    try:
        with pytest.raises(HostError, match="node 1") as caught:
            try_connect(fleet.cluster, fleet.files, fleet.cluster.nodes[1])
        assert not is_transient(caught.value)
    finally:
        for sshd in fleet.sshds:
            sshd.stop()


def test_all_others_go_through_one_connection_to_the_head(chained: Fleet) -> None:
    head = chained.sshds[0]
    before = head.log.count("Accepted publickey")
    with open_hosts(chained.cluster, chained.files) as hosts:
        assert [host.index for host in hosts] == [0, 1, 2]
        assert head.log.count("Accepted publickey") == before  # lazy
        homes = fanout.each(hosts, lambda host: host.run("echo $HOME").stdout.strip())
        fanout.each(hosts, lambda host: host.run("true"))
    assert homes == [str(sshd.home) for sshd in chained.sshds]
    assert head.log.count("Accepted publickey") == before + 1


def test_one_error_names_every_unreachable_node(chained: Fleet) -> None:
    head, *others = chained.cluster.nodes
    gone = tuple(replace(node, private_ip=f"127.0.0.9{node.index}") for node in others)
    with (
        open_hosts(replace(chained.cluster, nodes=(head, *gone)), chained.files) as hosts,
        pytest.raises(fanout.FanoutError) as caught,
    ):
        fanout.each(hosts, lambda host: host.run("true"))
    assert caught.value.what == "2 of 3 nodes failed"
    assert "node 1 (i-0001)" in caught.value.why
    assert "node 2 (i-0002)" in caught.value.why


def test_a_closed_host_opens_again(host: Host) -> None:
    host.run("true")
    host.close()
    assert host.run("echo again").stdout == "again\n"


# commands


def test_run(host: Host, direct: Fleet) -> None:
    result = host.run("pwd; echo 'a  b' >&2; [[ x == x ]] && echo bash")
    assert result.stdout == f"{direct.sshds[0].home}\nbash\n"
    assert result.stderr == "a  b\n"
    assert result.exit_code == 0


def test_exit_codes(host: Host) -> None:
    assert host.run("exit 3", check=False).exit_code == 3
    assert host.run("kill -9 $$", check=False).exit_code == 137
    with pytest.raises(HostError, match=r"node 0 \(i-0000\) with exit code 5") as caught:
        host.run("echo why >&2; exit 5")
    assert "why" in caught.value.why
    assert not is_transient(caught.value)


def test_a_command_has_no_stdin(host: Host) -> None:
    assert host.run("cat; echo end", timeout_seconds=5).stdout == "end\n"


def test_a_timeout_ends_the_command_on_the_node(host: Host, direct: Fleet) -> None:
    began = time.monotonic()
    with pytest.raises(HostError, match=r"node 0 .*did not end within 0\.5 s"):
        host.run("echo $$ >pid; sleep 60", timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    pid = int((direct.sshds[0].home / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert host.run("echo fine").stdout == "fine\n"


def test_a_command_ends_though_its_child_keeps_the_output_open(host: Host) -> None:
    began = time.monotonic()
    assert host.run("sleep 8 & echo started").stdout == "started\n"
    assert time.monotonic() - began < 5


def test_much_output_on_both_streams(host: Host) -> None:
    size = 3 << 20  # more than an SSH window
    result = host.run(f"head -c {size} /dev/zero | tr '\\0' e >&2; head -c {size} /dev/zero | tr '\\0' o")
    assert (len(result.stdout), len(result.stderr)) == (size, size)


def test_a_login_shell_that_prints(host: Host, direct: Fleet) -> None:
    noise = direct.sshds[0].home / ".bashrc"
    noise.write_text("echo welcome; echo beware >&2\n")
    try:
        result = host.run("echo answer")
        assert (result.stdout, result.stderr) == ("answer\n", "")
        lines: list[str] = []
        assert host.stream("echo line", lines.append) == 0
        assert lines == ["line"]
        noise.write_text("echo no entry; exit 7\n")
        with pytest.raises(HostError, match="before it ran the command") as caught:
            host.run("echo answer")
        assert "no entry" in caught.value.why
    finally:
        noise.unlink()


# streams


def test_lines_come_as_they_are_written(behind: Host) -> None:
    came: list[tuple[float, str]] = []
    code = behind.stream(
        "printf 'one\\ntw'; sleep 0.4; printf 'o\\r\\nthree'; exit 4",
        lambda line: came.append((time.monotonic(), line)),
    )
    assert code == 4
    assert [line for _, line in came] == ["one", "two", "three"]
    assert came[1][0] - came[0][0] > 0.2


def test_a_character_cut_between_two_packets(host: Host) -> None:
    lines: list[str] = []
    host.stream(r"printf '\303'; sleep 0.2; printf '\244\n\377broken\n\303'", lines.append)
    assert lines == ["ä", "�broken", "�"]


def test_a_stream_ends_with_its_command(host: Host) -> None:
    lines: list[str] = []
    began = time.monotonic()
    assert host.stream("sleep 8 & echo only", lines.append) == 0
    assert lines == ["only"]
    assert time.monotonic() - began < 5


def test_the_readers_own_error_is_not_taken_for_the_nodes(host: Host) -> None:
    def full(line: str) -> None:
        raise BrokenPipeError("my stdout is gone")

    with pytest.raises(BrokenPipeError, match="my stdout"):
        host.stream("echo line", full)


def test_ctrl_c_ends_a_stream(host: Host) -> None:
    main = threading.main_thread().ident
    assert main
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        host.stream("while sleep 0.1; do echo tick; done", lambda line: None)
    assert time.monotonic() - began < 5
    assert host.run("echo fine").stdout == "fine\n"


# the sshd that carries this very session is the first one above the command
MY_SSHD = "p=$$; until [[ $(ps -o comm= -p $p) == sshd* ]]; do p=$(ps -o ppid= -p $p); done; echo $p; sleep 10"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["broken", "silent"])
def test_a_connection_lost_in_a_stream(how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that only stops answering is noticed too."""
    monkeypatch.setattr("micsctl.remote.ssh._SILENCE_SECONDS", 0.5)
    fleet = make_fleet(tmp_path, ("127.0.0.7",), head_is_public=False)
    carriers: list[int] = []

    def strike(line: str) -> None:
        carriers.append(int(line))
        os.kill(carriers[0], how)

    try:
        with (
            open_host(fleet.cluster, fleet.files, fleet.cluster.head) as host,
            pytest.raises(HostError, match="lost the connection to node 0") as caught,
        ):
            host.stream(MY_SSHD, strike)
        assert is_transient(caught.value)
    finally:
        if how == signal.SIGSTOP:
            os.kill(carriers[0], signal.SIGKILL)
        fleet.sshds[0].stop()


# files


def test_write_and_read(behind: Host, chained: Fleet) -> None:
    home = chained.sshds[1].home
    behind.write("runs/a b/it's.txt", "ä\n$HOME `x`\n", mode=0o640)
    path = home / "runs/a b/it's.txt"
    assert path.read_text() == "ä\n$HOME `x`\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["it's.txt"]
    assert behind.read("runs/a b/it's.txt") == "ä\n$HOME `x`\n"
    behind.write(str(path), "")
    assert behind.read(str(path)) == ""
    assert behind.read("runs/none") is None


def test_a_write_that_is_cut_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection looks like the end of the file to the node."""
    host.write("whole", "old")

    def cut(channel, command, *, stdin=(), **rest):
        return execute(channel, command, stdin=[b"".join(stdin)[:2]], **rest)

    monkeypatch.setattr("micsctl.remote.ssh.execute", cut)
    with pytest.raises(HostError):
        host.write("whole", "new")
    assert host.read("whole") == "old"


def test_what_cannot_be_written_or_read(host: Host, direct: Fleet) -> None:
    (direct.sshds[0].home / "folder").mkdir(exist_ok=True)
    with pytest.raises(HostError, match="node 0"):
        host.write("folder", "text")
    with pytest.raises(HostError, match="node 0"):
        host.read("folder")
    assert [p for p in os.listdir(direct.sshds[0].home) if p.startswith("folder.")] == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep/__pycache__").mkdir(parents=True)
    (folder / "a.py").write_text("print(1)\n")
    (folder / "deep/it's b.txt").write_text("b")
    (folder / "deep/run.sh").write_text("#!/bin/sh\n")
    (folder / "deep/run.sh").chmod(0o755)
    (folder / "deep/link").symlink_to("../a.py")
    (folder / "deep/__pycache__/a.cpython-311.pyc").write_bytes(b"x")
    (folder / "stray.pyc").write_bytes(b"x")
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


EXPECTED = {"a.py": "print(1)\n", "deep/it's b.txt": "b", "deep/run.sh": "#!/bin/sh\n", "deep/link": "../a.py"}


@pytest.mark.parametrize("way", ["rsync", "tar"])
def test_send_folder(way: str, behind: Host, chained: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the head, into a path with blanks and quotes; extra files go, changed ones change."""
    if way == "rsync":
        if not copy.have_rsync():
            pytest.skip("no rsync here")
        monkeypatch.setattr("micsctl.remote.ssh.RSYNC_FROM_BYTES", 0)
    head = chained.sshds[0]
    behind.run("true")
    before = head.log.count("Accepted publickey")
    target = chained.sshds[1].home / "code" / f"it's {way}"
    behind.send_folder(source, f"code/it's {way}")
    assert tree(target) == EXPECTED
    assert os.access(target / "deep/run.sh", os.X_OK)
    assert head.log.count("Accepted publickey") - before == (way == "rsync")  # rsync has its own ssh, tar needs none
    (target / "deep/extra").write_text("x")
    (target / "extra folder").mkdir()
    (target / "a.py").write_text("changed")
    behind.send_folder(source, f"code/it's {way}")
    assert tree(target) == EXPECTED
    assert not (target / "extra folder").exists()
    assert os.listdir(target.parent).count(target.name) == 1


def test_a_large_folder_without_rsync_on_the_node(
    behind: Host, chained: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than an SSH window through the tar stream."""
    monkeypatch.setattr("micsctl.remote.ssh.have_rsync", lambda: False)
    monkeypatch.setattr("micsctl.remote.ssh.RSYNC_FROM_BYTES", 0)
    (source / "large").write_bytes(os.urandom(3 << 20))
    behind.send_folder(source, "large")
    assert (chained.sshds[1].home / "large/large").read_bytes() == (source / "large").read_bytes()


def test_a_login_shell_that_prints_makes_it_tar(
    host: Host, direct: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("micsctl.remote.ssh.RSYNC_FROM_BYTES", 0)
    noise = direct.sshds[0].home / ".bashrc"
    noise.write_text("echo welcome\n")
    try:
        host.send_folder(source, "noisy")
    finally:
        noise.unlink()
    assert tree(direct.sshds[0].home / "noisy") == EXPECTED


def test_a_tar_stream_that_is_cut_changes_nothing(
    host: Host, direct: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"".join(copy.tar_stream(source))
    home = direct.sshds[0].home
    (home / "kept").mkdir()
    (home / "kept/old").write_text("old")
    monkeypatch.setattr("micsctl.remote.ssh.tar_stream", lambda source: [whole[: len(whole) // 2]])
    with pytest.raises(HostError, match="node 0"):
        host.send_folder(source, "kept")
    assert tree(home / "kept") == {"old": "old"}
    assert [name for name in os.listdir(home) if name.startswith("kept.")] == []


def test_rsync_meets_a_wrong_host_key_as_we_do(
    chained: Fleet, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not copy.have_rsync():
        pytest.skip("no rsync here")
    monkeypatch.setattr("micsctl.remote.ssh.RSYNC_FROM_BYTES", 0)
    fleet = with_files(chained, tmp_path)
    with open_host(fleet.cluster, fleet.files, fleet.cluster.nodes[1]) as host:
        host.run("true")
        head, _, last = (sshd.host_key for sshd in fleet.sshds)
        fleet.trust(head, other_key(tmp_path), last)
        with pytest.raises(HostError, match="node 1") as caught:
            host.send_folder(source, "never")
    assert "HOST IDENTIFICATION HAS CHANGED" in caught.value.why or "verification failed" in caught.value.why


# OpenSSH's command line


def test_ssh_command_reaches_the_head_and_beyond(chained: Fleet) -> None:
    for node, sshd in list(zip(chained.cluster.nodes, chained.sshds, strict=True))[:2]:
        argv = [*ssh_command(chained.cluster, chained.files, node), "echo $HOME"]
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        assert (answer.stdout, answer.stderr, answer.returncode) == (f"{sshd.home}\n", "", 0)


def test_ssh_command_trusts_nothing_else(direct: Fleet) -> None:
    argv = ssh_command(direct.cluster, direct.files, direct.cluster.head)
    assert argv[:3] == ["ssh", "-F", "/dev/null"]
    for option in ("StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes", "IdentityAgent=none"):
        assert option in argv
    assert f"UserKnownHostsFile={direct.files.known_hosts}" in argv
    assert argv[-1] == "127.0.0.1"


def test_a_second_public_address_is_used_directly(chained: Fleet) -> None:
    node = Node(1, "i-0001", "running", "10.0.0.2", "127.0.0.3")
    cluster: Cluster = replace(chained.cluster, nodes=(chained.cluster.head, node))
    assert ssh_command(cluster, chained.files, node)[-1] == "127.0.0.3"
    assert not any("ProxyCommand" in word for word in ssh_command(cluster, chained.files, node))
