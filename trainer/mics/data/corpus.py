"""All files end to end as one row of tokens, and whether a run can use it."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mics.data.formats import TokenFile, open_file
from mics.data.order import windows_of
from mics.errors import RunRefusedError

BYTE_VALUES = 256

BLOCK_BYTES = 64 << 10  # of a large file its digest sees this many bytes ...
BLOCKS = 64  # ... at this many places, evenly spread, the first and the last among them

CHECKED_TOKENS = 1 << 20  # a rank looks at the token ids of so many at a time ...
CHECKED_BLOCKS = 256  # ... and at most so many times when a run starts


class BadTokenError(Exception):
    """A token that the model has no place for, met while training: the file changed, or no check had seen it."""


@dataclass(frozen=True)
class Corpus:
    """Files end to end."""

    pieces: tuple[TokenFile, ...]  # none empty
    ends: tuple[int, ...]  # ends[i]: tokens up to the end of piece i

    @classmethod
    def of(cls, pieces: Iterable[TokenFile]) -> Corpus:
        filled = tuple(piece for piece in pieces if len(piece.tokens))
        return cls(filled, tuple(accumulate(len(piece.tokens) for piece in filled)))

    @property
    def size(self) -> int:
        """Tokens."""
        return self.ends[-1] if self.ends else 0

    @property
    def unit(self) -> str:
        return "bytes" if all(piece.is_text for piece in self.pieces) else "tokens"

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count), fewer at the end of the corpus."""
        parts, stop = [np.zeros(0, dtype=np.int64)], min(start + count, self.size)
        which = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[which] - len(self.pieces[which].tokens)
            parts.append(self.pieces[which].tokens[start - begin : stop - begin].astype(np.int64))
            start, which = self.ends[which], which + 1
        return np.concatenate(parts)

    def part(self, start: int, stop: int) -> Corpus:
        """Tokens [start, stop) as a corpus of its own; nothing is copied."""
        begins = (0, *self.ends)
        return Corpus.of(
            replace(
                piece,
                tokens=piece.tokens[max(0, start - begin) : max(0, stop - begin)],
                begin=piece.begin + max(0, start - begin),
            )
            for piece, begin in zip(self.pieces, begins, strict=False)
        )

    def where(self, position: int) -> str:
        """The file and the place in it, for a message."""
        which = bisect_right(self.ends, position)
        piece = self.pieces[which]
        return f"{piece.path}: token {position - self.ends[which] + len(piece.tokens) + piece.begin:,}"

    def digest(self) -> str:
        """sha256 over sizes, indexes and contents in order; of files over 4 MiB only over BLOCKS blocks of contents.

        It tells other data from the same data; it is no proof that no bit has changed (`show --check` reads all).
        """
        total = hashlib.sha256()
        for piece in self.pieces:
            raw = piece.tokens.view(np.uint8)
            total.update(f"{piece.kind} {piece.tokens.dtype.str} {piece.index} {len(raw)}:".encode())
            if len(raw) <= BLOCKS * BLOCK_BYTES:
                total.update(raw.data)
                continue
            for i in range(BLOCKS):
                first = i * (len(raw) - BLOCK_BYTES) // (BLOCKS - 1)
                total.update(raw[first : first + BLOCK_BYTES].data)
        return total.hexdigest()


def open_corpus(files: Iterable[Path]) -> Corpus:
    """Map the files. Raises RunRefusedError for one that cannot be read, and for files that do not go together."""
    corpus = Corpus.of(open_file(path) for path in files)
    for piece in corpus.pieces[1:]:
        first = corpus.pieces[0]
        _check_same(first, piece)
        parts = {one.index.part for one in (first, piece) if one.index and one.index.part}
        if len(parts) > 1:
            raise _not_one(first, piece, "one is training data and one is not")
    return corpus


def check_same_tokens(one: Corpus, other: Corpus) -> None:
    """Raises RunRefusedError where their tokens do not mean the same. Neither is empty."""
    _check_same(one.pieces[0], other.pieces[0])


def _check_same(first: TokenFile, other: TokenFile) -> None:
    if first.is_text != other.is_text:
        raise _not_one(first, other, "one is text and one holds tokens")
    known = {one.index.tokenizer_sha256 for one in (first, other) if one.index and one.index.tokenizer_sha256}
    if len(known) > 1:
        raise _not_one(first, other, "their tokens come from different tokenizers")


def _not_one(first: TokenFile, other: TokenFile, why: str) -> RunRefusedError:
    return RunRefusedError(f"{first.path} and {other.path} do not go together: {why}; name the files you mean")


def check_corpus(corpus: Corpus, *, vocabulary: int, sequence: int, global_batch: int, key: str = "train.data") -> None:
    """Raises RunRefusedError where the model cannot read the tokens, or one step would see a sample twice.

    key  names the setting in messages
    """
    if corpus.unit == "bytes" and vocabulary < BYTE_VALUES:
        raise RunRefusedError(
            f"train.model: a vocabulary of {vocabulary} cannot hold bytes; the data needs at least {BYTE_VALUES}"
        )
    for piece in corpus.pieces:
        index = piece.index
        if index and index.largest is not None and index.largest >= vocabulary:
            at = f"token {index.largest_at:,}" if index.largest_at is not None else "its largest token"
            raise RunRefusedError(
                f"{key}: {piece.path}: {at} is {index.largest}, the model's vocabulary is {vocabulary}"
            )
    needed = global_batch * sequence + 1
    if corpus.size < needed:
        raise RunRefusedError(
            f"{key}: the corpus is too short: found {corpus.size} {corpus.unit}, one step needs {needed} "
            f"({global_batch} sequences of {sequence} {corpus.unit}, and one more)"
        )


def check_tokens(corpus: Corpus, *, vocabulary: int, rank: int, world_size: int) -> None:
    """This rank's share of a look at the token ids in files whose index does not say the largest one.

    All ranks together see everything up to world_size * 256 Mi tokens, and evenly spread blocks of a larger corpus.
    Raises RunRefusedError, which names file and place. (Whatever this does not see, `load_batch` does.)
    """
    starts = [
        (begin, len(piece.tokens))
        for piece, begin in zip(corpus.pieces, (0, *corpus.ends), strict=False)
        if np.iinfo(piece.tokens.dtype).min < 0 or np.iinfo(piece.tokens.dtype).max >= vocabulary
        if not (piece.index and piece.index.largest is not None)
    ]
    blocks = [begin + first for begin, count in starts for first in range(0, count, CHECKED_TOKENS)]
    looks = min(len(blocks), CHECKED_BLOCKS * world_size)
    for look in range(rank, looks, world_size):
        start = blocks[look * len(blocks) // looks]
        tokens = corpus.read(start, CHECKED_TOKENS)
        bad = outside(tokens, vocabulary)
        if bad is not None:
            raise RunRefusedError(
                f"{corpus.where(start + bad)} is {tokens[bad]}, the model's vocabulary is {vocabulary}"
            )


def outside(tokens: NDArray[np.int64], vocabulary: int) -> int | None:
    """Where in the flattened array the first id outside [0, vocabulary) is. Pure."""
    wrong = tokens.reshape(-1).view(np.uint64) >= np.uint64(vocabulary)  # as unsigned, a negative one is large
    return int(wrong.argmax()) if wrong.any() else None


def split(corpus: Corpus, share: float, sequence: int) -> tuple[Corpus, Corpus]:
    """Training and validation: the last `share` of the windows, at least one, is held out. Nothing is copied.

    No target of one is a target of the other. Raises RunRefusedError where nothing is left to train on.
    """
    windows = windows_of(corpus.size, sequence)
    held = max(1, round(share * windows))
    if held >= windows:
        raise RunRefusedError(
            f"train.validation: found {windows} sequences of {sequence} {corpus.unit} in train.data; "
            f"a share of {share} for validation leaves none to train on"
        )
    cut = (windows - held) * sequence
    return corpus.part(0, cut + 1), corpus.part(cut, corpus.size)
