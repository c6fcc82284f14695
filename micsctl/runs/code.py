"""Code on the nodes, the trainer's and the user's own: shipped once per content hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from mics.config import TrainConfig, is_foreign

from micsctl.errors import UsageError
from micsctl.remote.copy import LEFT_OUT
from micsctl.remote.host import Host

OWN_CODE_LIMIT_BYTES = 64 << 20  # a folder of this size holds more than code: every node would wait for it


def content_hash(package: Path) -> str:
    """Of a package, a folder or one file: of its name, and of what it holds by name and content; 16 hex digits."""
    digest = hashlib.sha256()
    for path in _files(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package.parent).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def ship(host: Host, package: Path, code_hash: str) -> None:
    """Make `.micsctl/code/<hash>/<package>` on the node. Its mark comes last, so that a broken copy is made again."""
    base = f".micsctl/code/{code_hash}"
    if host.read(f"{base}/complete") is not None:
        return
    if package.is_file():
        host.write(f"{base}/{package.name}", package.read_text(encoding="utf-8"))
    else:
        host.send_folder(package, f"{base}/{package.name}")
    host.write(f"{base}/complete", "")


def own_code(train: TrainConfig, folder: Path) -> Path | None:
    """The package of `model: package.module:factory` that lies in `folder`, beside mics.yaml; None: the nodes have it.

    Raises UsageError for a folder that is too large to be code.
    """
    if not isinstance(train.model, str) or not is_foreign(train.model) or train.model.startswith("hf:"):
        return None
    name = train.model.split(":")[0].split(".")[0]
    found = next((path for path in (folder / name, folder / f"{name}.py") if name and path.exists()), None)
    size = sum(path.stat().st_size for path in _files(found)) if found else 0
    if size > OWN_CODE_LIMIT_BYTES:
        raise UsageError(
            f"{found} is too large to be sent to every node",
            f"it holds {size >> 20} MiB; code of a model has at most {OWN_CODE_LIMIT_BYTES >> 20} MiB",
            next="move data and checkpoints out of it, or install the package on the nodes",
        )
    return found


def _files(package: Path) -> Iterator[Path]:
    """What `send_folder` sends, in a fixed order."""
    for path in sorted(package.rglob("*")) if package.is_dir() else [package]:
        parts = path.relative_to(package.parent).parts
        if path.is_file() and not any(fnmatch(part, pattern) for part in parts for pattern in LEFT_OUT):
            yield path
