"""MiCS: sharding inside a partition group, two-hop gradient synchronisation, on PyTorch FSDP2.

`import mics` is light; torch is imported when one of the engine's names is first used.
"""

from __future__ import annotations

from typing import Any

_ENGINE = {"connect": "sharding", "apply": "sharding", "boundary": "sharding", "clip": "sharding"}

__all__ = ["apply", "boundary", "clip", "connect"]


def __getattr__(name: str) -> Any:
    if name in _ENGINE:
        import importlib

        return getattr(importlib.import_module(f"mics.{_ENGINE[name]}"), name)
    raise AttributeError(f"module 'mics' has no attribute {name!r}")
