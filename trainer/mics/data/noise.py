"""Random numbers that are functions: of the seed and of what they are for, with no state. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_A, _B, _C = np.uint64(30), np.uint64(27), np.uint64(31)


def word(number: int) -> Words:
    """A Python integer, modulo 2^64, as an array of one (NumPy warns where a single number overflows)."""
    return np.array([number & (2**64 - 1)], dtype=np.uint64)


def draw(*words: Words) -> Words:
    """64 random bits for each combination of the words, which broadcast: a chain of splitmix64 (Steele et al. 2014)."""
    bits = word(0)
    for part in words:
        bits = (bits ^ part) + _GOLDEN
        bits = (bits ^ (bits >> _A)) * _FIRST
        bits = (bits ^ (bits >> _B)) * _SECOND
        bits = bits ^ (bits >> _C)
    return bits
