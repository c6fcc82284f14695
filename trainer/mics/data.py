"""The corpus as bytes, and which sample goes where.

A sample is one window of the corpus. Its place depends on (seed, global sample index) only: never on n, p, or how the
global batch is cut into micro-steps. So any rank grid sees the same global batch at the same step.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from mics.errors import RunRefusedError
from mics.models.gpt import IGNORED
from mics.paths import on_this_node

BYTE_VALUES = 256
ROUNDS = 4  # of the Feistel network; four make a pseudo-random permutation (Luby, Rackoff 1988)


@dataclass(frozen=True)
class Corpus:
    """Files end to end. They are mapped, not read: memory is shared by the ranks of a node and filled on demand."""

    files: tuple[Path, ...]
    pieces: tuple[Tensor, ...]  # uint8, one per file
    ends: tuple[int, ...]  # ends[i]: bytes up to the end of file i

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, count: int) -> Tensor:
        """Bytes [start, start + count) as int64, fewer at the end of the corpus."""
        parts, stop = [], min(start + count, self.size)
        which = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[which] - len(self.pieces[which])
            parts.append(self.pieces[which][start - begin : stop - begin])
            start, which = self.ends[which], which + 1
        return torch.cat(parts).long()

    def digest(self) -> str:
        """sha256 over sizes and contents, in order."""
        total = hashlib.sha256()
        for path, piece in zip(self.files, self.pieces, strict=True):
            with path.open("rb") as file:
                total.update(f"{len(piece)}:".encode() + hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def standard_library() -> tuple[Path, ...]:
    """The source files at the top of Python's standard library, sorted: real text that is there without a download."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Not everything there belongs to Python: sitecustomize and build settings differ from machine to machine.
    return tuple(sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names))


def find_files(data: Iterable[str], environment: Mapping[str, str]) -> tuple[Path, ...]:
    """The files that `data` names, in order: "stdlib", a file, or a folder (all files below it, sorted, none hidden).

    Raises RunRefusedError for a name that is not there.
    """
    found: list[Path] = []
    for name in data:
        path = Path(on_this_node(name, environment))
        if name == "stdlib":
            found += standard_library()
        elif path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        elif path.is_file():
            found.append(path)
        else:
            raise RunRefusedError(f"train.data: {name} is not there; every node needs the same files at the same place")
    return tuple(found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def open_corpus(files: Iterable[Path]) -> Corpus:
    """Map the files. Raises RunRefusedError for one that cannot be read."""
    try:
        filled = tuple((path, size) for path in files if (size := path.stat().st_size))
        pieces = tuple(torch.from_file(str(path), size=size, dtype=torch.uint8) for path, size in filled)
    except (OSError, RuntimeError) as error:
        raise RunRefusedError(f"train.data cannot be read: {str(error).splitlines()[0]}") from error
    return Corpus(tuple(path for path, _ in filled), pieces, tuple(accumulate(size for _, size in filled)))


def check_corpus(size: int, *, vocabulary: int, sequence: int, global_batch: int) -> None:
    """Raises RunRefusedError where the model cannot read bytes, or one step would see a sample twice."""
    if vocabulary < BYTE_VALUES:
        raise RunRefusedError(
            f"train.model: a vocabulary of {vocabulary} cannot hold bytes; the data needs at least {BYTE_VALUES}"
        )
    needed = global_batch * sequence + 1
    if size < needed:
        raise RunRefusedError(
            f"train.data: the corpus is too short: found {size} bytes, one step needs {needed} "
            f"({global_batch} sequences of {sequence} bytes, and one more)"
        )


def windows_of(size: int, sequence: int) -> int:
    """Windows in a corpus of `size` bytes. Each predicts `sequence` bytes; the last one may predict fewer."""
    return -(-(size - 1) // sequence)


def window_of(sample: int, *, windows: int, seed: int) -> int:
    """The window that a sample (0, 1, ... without end) reads. Each epoch is a permutation of all windows. Pure."""
    epoch, position = divmod(sample, windows)
    half = max(1, ((windows - 1).bit_length() + 1) // 2)  # bits in each half of the Feistel network
    while True:  # walk the cycle until the value lies in range; at most 4 rounds on average
        position = _feistel(position, half, f"{seed}:{epoch}")
        if position < windows:
            return position


def _feistel(value: int, half: int, key: str) -> int:
    """A permutation of the integers of 2 * half bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        mixed = hashlib.blake2b(f"{key}:{turn}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
    return left << half | right


def deal(first: int, *, rank: int, world_size: int, micro_batch: int, accumulation: int) -> tuple[range, ...]:
    """The global sample indices of one rank in the step whose batch starts at `first`, one range per micro-step. Pure.

    The step's batch is [first, first + world_size * micro_batch * accumulation).
    """
    stride = world_size * micro_batch
    starts = (first + micro * stride + rank * micro_batch for micro in range(accumulation))
    return tuple(range(start, start + micro_batch) for start in starts)


def load_batch(corpus: Corpus, samples: Sequence[int], *, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the samples, int64 [len(samples), sequence]. IGNORED past the end of the corpus."""
    inputs = torch.zeros(len(samples), sequence, dtype=torch.int64)
    targets = torch.full((len(samples), sequence), IGNORED, dtype=torch.int64)
    windows = windows_of(corpus.size, sequence)
    for row, sample in enumerate(samples):
        text = corpus.read(window_of(sample, windows=windows, seed=seed) * sequence, sequence + 1)
        inputs[row, : len(text) - 1] = text[:-1]
        targets[row, : len(text) - 1] = text[1:]
    return inputs, targets
