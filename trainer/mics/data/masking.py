"""Masked language modelling as BERT does it (Devlin et al. 2018, section 3.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mics.data.noise import Words, draw, word

CHOSEN = 0.15  # of a sequence's tokens, at least one: these are to be guessed
HIDDEN, REPLACED = 0.8, 0.1  # of the chosen: show the mask token; show a random one. The rest stays as it is


def mask_tokens(
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    samples: Sequence[int],
    *,
    seed: int,
    mask_token: int,
    vocabulary: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """What the model sees, and which positions it must guess; both [rows, sequence].

    tokens   int64 [rows, sequence], of which the first lengths[row] are text
    samples  global sample index of each row: with the seed it decides everything, so that each epoch differs and no
             rank grid does
    """
    place = (word(seed), np.array(samples, dtype=np.uint64)[:, None], np.arange(tokens.shape[1], dtype=np.uint64))
    chosen = _lowest(draw(*place), lengths)
    fate = _fraction(draw(*place, word(1)))
    seen = np.where(chosen & (fate < HIDDEN), mask_token, tokens)
    replaced = chosen & (fate >= HIDDEN) & (fate < HIDDEN + REPLACED)
    return np.where(replaced, draw(*place, word(2)) % np.uint64(vocabulary), seen).astype(np.int64), chosen


def _lowest(numbers: Words, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The CHOSEN share of each row's first `length` places: those with the lowest numbers."""
    counts = np.where(lengths > 0, np.maximum(1, np.rint(CHOSEN * lengths)), 0).astype(np.int64)
    text = np.arange(numbers.shape[1]) < lengths[:, None]
    drawn = np.where(text, numbers, np.uint64(2**64 - 1))
    limits = np.take_along_axis(np.sort(drawn, axis=1), np.maximum(counts - 1, 0)[:, None], axis=1)
    return text & (drawn <= limits) & (counts > 0)[:, None]


def _fraction(bits: Words) -> NDArray[np.float64]:
    """In [0, 1), from the upper 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
