"""Shared paths. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

SHARED = PurePosixPath("/fsx")


def on_this_node(path: str, environment: Mapping[str, str]) -> str:
    """Where `path` is on this node: below MICS_SHARED instead of /fsx, where that variable is set. Pure.

    A sandbox that may not mount anything names in it the folder that stands for /fsx.
    """
    shared = environment.get("MICS_SHARED")
    if shared and PurePosixPath(path).is_relative_to(SHARED):
        return str(PurePosixPath(shared) / PurePosixPath(path).relative_to(SHARED))
    return path
