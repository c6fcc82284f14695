"""A folder as bytes on the way to a node: as one tar stream, or by rsync where that is worth its own login."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

LEFT_OUT = ("__pycache__", "*.pyc")
RSYNC_FROM_BYTES = 8 << 20  # below, the whole folder is on the node before rsync's ssh has logged in
_CHUNK_BYTES = 1 << 16


def folder_bytes(source: Path) -> int:
    return sum(path.stat().st_size for path in source.rglob("*") if path.is_file() and not path.is_symlink())


def have_rsync() -> bool:
    """Whether this machine has the real rsync 3 (macOS ships another program of the same name)."""
    program = shutil.which("rsync")
    if not program:
        return False
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return answer.stdout.startswith("rsync  version 3")


def rsync_command(source: Path, target: str, ssh_argv: Sequence[str]) -> list[str]:
    """The argv that makes `target` on the node equal to `source`. `ssh_argv` ends with the node's address."""
    *ssh, address = ssh_argv
    exclude = [f"--exclude={pattern}" for pattern in LEFT_OUT]
    return [
        "rsync",
        "--recursive",
        "--links",
        "--perms",
        "--times",
        "--compress",
        "--delete",
        "--delete-excluded",
        "--protect-args",
        "--timeout=60",
        *exclude,
        "-e",
        " ".join(_rsh_quoted(word) for word in ssh),
        f"{source}/",
        f"{address}:{target}/",
    ]


def tar_stream(source: Path) -> Iterator[bytes]:
    """The folder as gzipped tar, in chunks. gzip, because a plain tar that is cut short can pass for a whole one."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
            tar.add(source, arcname=".", filter=_kept)
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def untar_command(target: str) -> str:
    """Shell text that unpacks stdin beside `target` and puts it in its place once it is whole."""
    quoted = shlex.quote(target.rstrip("/"))
    return f"""set -e
target={quoted}
mkdir -p -- "$(dirname -- "$target")"
new=$(mktemp -d -- "$target.XXXXXX")
trap 'rm -rf -- "$new" "$new.old"' EXIT
tar -xzf - --no-same-owner -C "$new"
if [ -e "$target" ]; then mv -T -- "$target" "$new.old"; fi
mv -T -- "$new" "$target"
"""


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    path = Path(member.name)
    if any(path.match(pattern) for pattern in LEFT_OUT):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _rsh_quoted(word: str) -> str:
    """rsync splits its -e at spaces; a quote inside quotes is written twice (rsync(1), --rsh)."""
    return "'" + word.replace("'", "''") + "'"
