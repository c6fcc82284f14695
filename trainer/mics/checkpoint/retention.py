"""Which checkpoints go when a new one is whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def to_remove(steps: Iterable[int], keep: int, keep_every: int) -> list[int]:
    """The steps whose checkpoints are not needed any more, from old to new.

    steps       of the whole checkpoints of one run, the newest included
    keep        so many of the newest stay; 0 = all
    keep_every  and those whose step is a multiple of it; 0 = none
    """
    ordered = sorted(set(steps))
    if keep == 0:
        return []
    return [step for step in ordered[:-keep] if not (keep_every and step % keep_every == 0)]
