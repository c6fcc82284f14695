"""MiCS: sharding inside a partition group, two-hop gradient synchronisation, on PyTorch FSDP2.

`import mics` is light; torch is imported when one of the engine's names is first used.
"""

from __future__ import annotations

from typing import Any

_MODULES = {
    **dict.fromkeys(("abort", "apply", "boundary", "check_replicas", "clip", "connect", "disconnect"), "mics.sharding"),
    **dict.fromkeys(("Trial", "hierarchical_pays"), "mics.trial"),
    "RankGrid": "mics.topology",
    "prepare_blocks": "mics.recompute",
    "rank_grid": "mics.strategies",
}
__all__ = [*_MODULES, "metrics"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "metrics":
        return importlib.import_module("mics.metrics")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mics' has no attribute {name!r}")
