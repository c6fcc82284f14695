"""The files that train.data names."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from mics.errors import RunRefusedError
from mics.paths import on_this_node


def standard_library() -> tuple[Path, ...]:
    """The source files at the top of Python's standard library, sorted: real text that is there without a download."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Not everything there belongs to Python: sitecustomize and build settings differ from machine to machine.
    return tuple(sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names))


def find_files(data: Iterable[str], environment: Mapping[str, str], key: str = "train.data") -> tuple[Path, ...]:
    """The files that `data` names, in order: "stdlib", a file, or a folder (all files below it, sorted, none hidden).

    key  names the setting in messages

    Raises RunRefusedError for a name that is not there, and for a folder that may not be read.
    """
    found: list[Path] = []
    for name in data:
        path = Path(on_this_node(name, environment))
        try:
            if name == "stdlib":
                found += standard_library()
            elif path.is_dir():
                found += files_below(path)
            elif path.is_file():
                found.append(path)
            else:
                raise RunRefusedError(f"{key}: {name} is not there; every node that uses it needs it at the same place")
        except OSError as error:
            raise RunRefusedError(f"{key}: {error.filename} cannot be read: {error.strerror}") from error
    return tuple(found)


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted, none hidden, without the indexes of token files beside them.

    Raises OSError for a folder that cannot be read (Path.rglob would leave it out without a word).
    """
    files = (Path(parent, name) for parent, _, names in os.walk(folder, onerror=_raise) for name in names)
    return sorted(p for p in files if p.is_file() and not _hidden(p.relative_to(folder)) and not _beside(p))


def _raise(error: OSError) -> None:
    raise error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _beside(path: Path) -> bool:
    """Whether the file is the index of a token file, which is read through that one."""
    return path.suffix in (".json", ".idx") and path.with_suffix(".bin").is_file()
