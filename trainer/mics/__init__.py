"""MiCS: sharding inside a partition group, two-hop gradient synchronisation, on PyTorch FSDP2.

`import mics` is light; torch is imported when one of the engine's names is first used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["abort", "apply", "boundary", "check_replicas", "clip", "connect"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("mics.sharding"), name)
    raise AttributeError(f"module 'mics' has no attribute {name!r}")
