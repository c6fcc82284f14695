"""The layer that makes this machine's root look like a Deep Learning AMI: login user, sshd, Python, `shutdown`.

It is the upper of the two read-only layers below every node's own; files here hide those of this machine.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VENV = "/opt/pytorch"  # where the Deep Learning AMIs have theirs
HOSTS_FILE = "vpc-hosts"  # beside the tree: one live file, the VPC's name service
_FRESH = ("/tmp", "/run", "/dev", "/var/run", "/dev/shm")  # empty on every node
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_SSHD_PATH = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin"
_ENDING = ("shutdown", "poweroff", "halt")

# pid 1 of a node is its sshd; only root may signal it
_SHUTDOWN = """\
#!/bin/sh
# Ends this instance; `shutdown +5` ends it in five minutes.
for word; do
    case $word in
        +[0-9]*) minutes=${word#+} ;;
    esac
done
[ "$(id -u)" = 0 ] || { echo "shutdown: must be root" >&2; exit 1; }
if [ "${minutes:-0}" -gt 0 ]; then
    (sleep "$((minutes * 60))" && kill -TERM 1) </dev/null >/dev/null 2>&1 &
    exit 0
fi
kill -TERM 1
"""
_SYSTEMCTL = """\
#!/bin/sh
case $1 in poweroff | halt) exec shutdown now ;; esac
echo "System has not been booted with systemd as init system (PID 1). Can't operate." >&2
exit 1
"""
_SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
HostKey /etc/ssh/ssh_host_ecdsa_key
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PidFile none
UseDNS no
PrintMotd no
PrintLastLog no
LogLevel ERROR
MaxStartups 100
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Image:
    """What a node needs besides the layer."""

    sshd: str
    binds: tuple[tuple[str, str], ...]  # source on this machine, target on the node; read-only
    user: str
    uid: int
    gid: int


def build(tree: Path, user: str, mark: str, hidden: Iterable[Path]) -> Image:
    """Fill the empty folder `tree`, which must lie on a filesystem of its own (else overlayfs says ELOOP).

    `hidden` are paths of this machine that no node shall see.
    """
    uid, gid = _make_user(tree, user)
    _write(tree, "etc/micsctl-sandbox", mark + "\n")
    _write(tree, "etc/ssh/sshd_config_sandbox", _SSHD_CONFIG)
    # without a resolver each accepted connection of a rendezvous would wait for a look-up to time out
    _write(tree, "etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    _write(tree, "etc/resolv.conf", "# names come from /etc/hosts\n")
    for name in _ENDING:
        _write(tree, f"usr/sbin/{name}", _SHUTDOWN, 0o755)
    _write(tree, "usr/bin/systemctl", _SYSTEMCTL, 0o755)
    for folder in ("fsx", "var/log", "var/lib/cloud/instance", "var/tmp"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    (tree / "var/tmp").chmod(0o1777)
    roots = python_roots()
    _make_venv(tree)
    for path in hidden:
        _hide(tree, path)
    for path in [*roots, *map(Path, sys.path[1:])]:
        _open_parents(tree, path)
    mounts = mount_points()
    shims = [(str(tree / f"usr/sbin/{name}"), f"/usr/sbin/{name}") for name in _ENDING]
    binds = [
        *((path, path) for path in _SYSTEM if Path(path).is_dir() and not Path(path).is_symlink() and path in mounts),
        *((str(path), str(path)) for path in roots if needs_bind(str(path), mounts)),
        *((source, target) for source, target in shims if "/usr" in mounts and Path(target).exists()),
    ]
    return Image(_find_sshd(), tuple(binds), user, uid, gid)


def python_roots() -> list[Path]:
    """Folders that the interpreter and its packages live in, outermost only."""
    executable = Path(os.path.realpath(sys.executable))
    candidates = {
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(os.path.realpath(sys.prefix)),
        Path(os.path.realpath(sys.base_prefix)),
        executable.parent.parent,
        *_site_packages(),
    }
    return sorted(
        path for path in candidates if not any(other != path and other in path.parents for other in candidates)
    )


def needs_bind(path: str, mounts: Sequence[str]) -> bool:
    """Is `path` missing from a node's root, which shows this machine's "/" without what is mounted on it?"""
    return any(path == fresh or path.startswith(f"{fresh}/") for fresh in _FRESH) or any(
        point != "/" and (point == path or path.startswith(f"{point}/") or point.startswith(f"{path}/"))
        for point in mounts
    )


def mount_points(table: str | None = None) -> list[str]:
    """From /proc/self/mountinfo, without those below /proc, /sys and /dev."""
    text = Path("/proc/self/mountinfo").read_text() if table is None else table
    points = [line.split()[4].encode().decode("unicode_escape") for line in text.splitlines()]
    return [point for point in points if not (point + "/").startswith(("/proc/", "/sys/", "/dev/"))]


def _site_packages() -> list[Path]:
    return [
        Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()
    ]


def _make_venv(tree: Path) -> None:
    """A virtual environment that sees exactly the packages of this interpreter."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    executable = os.path.realpath(sys.executable)
    packages = f"opt/pytorch/lib/{version}/site-packages"
    inside = sys.prefix != sys.base_prefix
    _write(
        tree,
        "opt/pytorch/pyvenv.cfg",
        f"home = {os.path.dirname(executable)}\n"
        f"include-system-site-packages = {'false' if inside else 'true'}\n"
        f"version = {sys.version.split()[0]}\n",
    )
    _write(tree, f"{packages}/_host.pth", "".join(f"{path}\n" for path in _site_packages()))
    (tree / "opt/pytorch/bin").mkdir(exist_ok=True)
    for name in ("python", "python3", version):
        (tree / "opt/pytorch/bin" / name).symlink_to(executable)


def _make_user(tree: Path, user: str) -> tuple[int, int]:
    """The login user in the layer's own passwd, group and shadow; its uid and gid."""
    try:
        known = pwd.getpwnam(user)
        uid, gid = known.pw_uid, known.pw_gid
    except KeyError:
        taken = {one.pw_uid for one in pwd.getpwall()} | {one.gr_gid for one in grp.getgrall()}
        uid = gid = next(number for number in range(1000, 60000) if number not in taken)
    files = {
        "passwd": (f"{user}:x:{uid}:{gid}::/home/{user}:/bin/bash", 0o644),
        # `!` would be a locked account, which sshd refuses
        "shadow": (f"{user}:*:19000:0:99999:7:::", 0o600),
    }
    if gid == uid and gid not in {one.gr_gid for one in grp.getgrall()}:
        files["group"] = (f"{user}:x:{gid}:", 0o644)
    for name, (line, mode) in files.items():
        here = Path("/etc", name).read_text().splitlines()
        kept = [one for one in here if not one.startswith(f"{user}:")]
        _write(tree, f"etc/{name}", "\n".join([*kept, line]) + "\n", mode)
    return uid, gid


def _open_parents(tree: Path, path: Path) -> None:
    """Let the login user pass through closed folders above `path`, such as a home."""
    for parent in [*reversed(path.parents), path]:
        try:
            mode = parent.stat().st_mode
        except OSError:
            return
        if stat.S_ISDIR(mode) and mode & 0o011 != 0o011:
            inside = tree / str(parent).lstrip("/")
            inside.mkdir(parents=True, exist_ok=True)
            inside.chmod((mode & 0o7777) | 0o011)


def _hide(tree: Path, path: Path) -> None:
    """A character device 0:0 is overlayfs's "there is nothing here"."""
    inside = tree / str(path).lstrip("/")
    if not path.exists() or os.path.lexists(inside):
        return
    inside.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        shutil.copymode(parent, tree / str(parent).lstrip("/"))  # overlayfs shows the topmost layer's mode
    os.mknod(inside, stat.S_IFCHR, os.makedev(0, 0))


def secrets_of(homes: Iterable[Path], more: Iterable[Path]) -> list[Path]:
    """What no node shall see: everybody's keys and credentials, and `more`."""
    names = (".ssh", ".aws", ".netrc", ".git-credentials", ".config/gh", ".docker", ".gnupg", ".kube")
    return [*(home / name for home in homes for name in names), *more]


def home_folders() -> list[Path]:
    return sorted({Path(one.pw_dir) for one in pwd.getpwall() if one.pw_dir.startswith(("/home/", "/root"))})


def _find_sshd() -> str:
    found = shutil.which("sshd", path=_SSHD_PATH)
    if not found:
        raise FileNotFoundError("sshd")
    return found


def _write(tree: Path, name: str, text: str, mode: int = 0o644) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def as_environment(image: Image) -> Mapping[str, str]:
    """For boot.sh."""
    return {"SSHD": image.sshd, "LOGIN": image.user, "LOGIN_UID": str(image.uid), "LOGIN_GID": str(image.gid)}
