"""The corpus, which sample goes where, and the tensors that a model trains on.

Light: a module is imported when one of its names is first used, so `python -m mics.data prepare` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mics.data.batches import Batch, load_batch, validation_batches
    from mics.data.corpus import BadTokenError, Corpus, check_corpus, check_tokens, open_corpus, split
    from mics.data.feed import Feed
    from mics.data.files import find_files
    from mics.data.order import deal
    from mics.data.run import RunData, copy_data, mask_token_of, open_data

__all__ = [
    "BadTokenError",
    "Batch",
    "Corpus",
    "Feed",
    "RunData",
    "check_corpus",
    "check_tokens",
    "copy_data",
    "deal",
    "find_files",
    "load_batch",
    "mask_token_of",
    "open_corpus",
    "open_data",
    "split",
    "validation_batches",
]

_HOME = {
    "batches": ("Batch", "load_batch", "validation_batches"),
    "corpus": ("BadTokenError", "Corpus", "check_corpus", "check_tokens", "open_corpus", "split"),
    "feed": ("Feed",),
    "files": ("find_files",),
    "order": ("deal",),
    "run": ("RunData", "copy_data", "mask_token_of", "open_data"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"mics.data.{module}"), name)
    raise AttributeError(f"module 'mics.data' has no attribute {name!r}")
