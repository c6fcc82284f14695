"""Where checkpoints may lie: the nodes end at their TTL, and what is on their own disks ends with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from micsctl.errors import UsageError
from micsctl.remote import fanout
from micsctl.remote.host import Host

# `mounted` where the path is below an /fsx that is mounted (or that MICS_SHARED stands for), else the type of its file
# system: of the nearest folder above it that is there.
_ASK = r"""
case $path/ in /fsx/*) if [ -n "${MICS_SHARED:-}" ] || mountpoint -q /fsx; then echo mounted; exit; fi ;; esac
until [ -e "$path" ]; do path=$(dirname -- "$path"); done
findmnt -n -o FSTYPE -T "$path" 2>/dev/null || stat -f -c %T -- "$path"
"""

_SHARED = re.compile(
    r"mounted|lustre|nfs\d?|efs|fuse\.(?!fuse-overlayfs).*|beegfs\w*|gpfs|ceph|cifs|smb[23]|wekafs|panfs|pvfs2|9p|virtiofs"
)


def require_shared(hosts: Sequence[Host], path: str) -> None:
    """Refuse a checkpoint path that would end with the nodes. One remote command a node; none for s3://.

    Raises UsageError that names the nodes and the type of their file system.
    """
    if path.startswith("s3://"):
        return
    question = f"path={shlex.quote(path)}\n{_ASK}"
    types = fanout.each(hosts, lambda host: host.run(question).stdout.split("\n")[0].strip())
    local = [(host.name, type) for host, type in zip(hosts, types, strict=True) if not is_shared(type)]
    if local:
        lines = [f"{name}: {path} is on its own disk ({type})" for name, type in local]
        raise UsageError(
            "checkpoints would be lost with the nodes",
            "\n".join(["the nodes end at their TTL and their disks with them", *lines]),
            next="train.checkpoint.path: s3://bucket/prefix, or a folder of a file system that all nodes share"
            " (FSx for Lustre at /fsx, EFS); train.checkpoint.every: 0 goes without checkpoints",
        )


def is_shared(type: str) -> bool:
    """Whether a file system of this type, as findmnt or stat name it, is one that machines share. Pure."""
    return _SHARED.fullmatch(type) is not None
