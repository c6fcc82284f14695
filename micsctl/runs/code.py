"""The trainer's code on the nodes: shipped once per content hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from micsctl.remote.host import Host


def content_hash(folder: Path) -> str:
    """Of every Python file below `folder`, by relative name and content; 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def ship(host: Host, package: Path, code_hash: str) -> None:
    """Make `.micsctl/code/<hash>/mics` on the node. Its completion mark comes last, so a broken copy is made again."""
    base = f".micsctl/code/{code_hash}"
    if host.read(f"{base}/complete") is not None:
        return
    host.send_folder(package, f"{base}/mics")
    host.write(f"{base}/complete", "")
