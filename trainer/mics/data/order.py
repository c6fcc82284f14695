"""Which sample reads which window, and which rank gets which sample. Pure.

A sample is one window of the corpus. Its place depends on (seed, global sample index) only: never on n, p, or how the
global batch is cut into micro-steps. So one number, the samples drawn so far, is the whole state of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mics.data.noise import Words, draw, word

ROUNDS = 4  # of the Feistel network; four make a pseudo-random permutation (Luby, Rackoff 1988)


def windows_of(size: int, sequence: int) -> int:
    """Windows in a corpus of `size` tokens. Each predicts `sequence` tokens; the last one may predict fewer."""
    return max(0, -(-(size - 1) // sequence))


def windows_at(samples: Sequence[int], *, windows: int, seed: int) -> NDArray[np.int64]:
    """The windows that the samples (0, 1, ... without end) read. Each epoch is a permutation of all windows.

    Takes no memory for the permutation: a Feistel network whose cycle is walked until the value lies in range.
    """
    epochs, positions = np.divmod(np.array(samples, dtype=np.uint64), np.uint64(windows))
    keys = draw(word(seed), epochs)
    half = max(1, ((windows - 1).bit_length() + 1) // 2)  # bits in each half of the Feistel network
    positions = _feistel(positions, half, keys)
    while (outside := positions >= windows).any():  # 4 rounds on average at most
        positions[outside] = _feistel(positions[outside], half, keys[outside])
    return positions.astype(np.int64)


def _feistel(values: Words, half: int, keys: Words) -> Words:
    """A permutation of the integers of 2 * half bits, for each key."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (draw(keys, word(turn), right) & mask)
    return left << bits | right


def deal(first: int, *, rank: int, world_size: int, micro_batch: int, accumulation: int) -> tuple[range, ...]:
    """The global sample indices of one rank in the step whose batch starts at `first`, one range per micro-step.

    The step's batch is [first, first + world_size * micro_batch * accumulation).
    """
    stride = world_size * micro_batch
    starts = (first + micro * stride + rank * micro_batch for micro in range(accumulation))
    return tuple(range(start, start + micro_batch) for start in starts)
