"""What is in S3 objects: files that never change. Slices and joins of them copy nothing."""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BLOCK_BYTES = 1 << 20


class _File:
    """Removed when nobody refers to it any more: a download that runs outlives its object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, path.unlink, missing_ok=True).atexit = False  # the whole folder goes then


@dataclass(frozen=True)
class _Piece:
    file: _File
    start: int
    stop: int


class Content:
    """A sequence of pieces of files. Reads like bytes, as far as moto needs it: length, slices, iteration by blocks."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.pieces = tuple(piece for piece in pieces if piece.stop > piece.start)
        self._size_bytes = sum(piece.stop - piece.start for piece in self.pieces)

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, wanted: slice) -> Content:
        start, stop, _ = wanted.indices(self._size_bytes)
        found, offset = [], 0
        for piece in self.pieces:
            size = piece.stop - piece.start
            low, high = max(start - offset, 0), min(stop - offset, size)
            found.append(_Piece(piece.file, piece.start + low, piece.start + high))
            offset += size
        return Content(found)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            with piece.file.path.open("rb") as file:
                file.seek(piece.start)
                left = piece.stop - piece.start
                while left:
                    block = file.read(min(left, BLOCK_BYTES))
                    left -= len(block)
                    yield block

    def __bytes__(self) -> bytes:
        return b"".join(self)

    @cached_property
    def md5(self) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for block in self:
            digest.update(block)
        return digest.hexdigest()


def joined(contents: Iterable[Content]) -> Content:
    return Content([piece for content in contents for piece in content.pieces])


def store(folder: Path, blocks: Iterable[bytes]) -> Content:
    """Write the blocks into a new file of the folder."""
    file = _File(folder / secrets.token_hex(16))
    with file.path.open("xb") as out:
        for block in blocks:
            out.write(block)
        size_bytes = out.tell()
    return Content([_Piece(file, 0, size_bytes)])
