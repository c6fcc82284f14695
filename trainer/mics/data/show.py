"""What a corpus is, in words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from mics.data.formats import TokenFile
from mics.errors import RunRefusedError

BLOCK_TOKENS = 1 << 22


def describe(pieces: Sequence[TokenFile]) -> Iterator[str]:
    """One line for each file and one for all."""
    for piece in pieces:
        index = piece.index
        facts = [
            f"{piece.kind}",
            f"{len(piece.tokens):,} {'bytes' if piece.is_text else f'tokens of {piece.tokens.dtype.name}'}",
            f"{piece.documents:,} documents" if piece.documents is not None else None,
            f"vocabulary {index.vocabulary:,}" if index and index.vocabulary is not None else None,
            f"largest id {index.largest:,}" if index and index.largest is not None else None,
            f"tokenizer {index.tokenizer}" if index and index.tokenizer else None,
        ]
        yield f"{piece.path}: {', '.join(fact for fact in facts if fact)}"
    stored = sum(piece.tokens.nbytes for piece in pieces)
    tokens = sum(len(piece.tokens) for piece in pieces)
    yield f"{len(pieces)} files, {tokens:,} tokens, {stored:,} bytes"


def check(piece: TokenFile) -> str:
    """Read all of a file: its largest id, and whether it still is what its index says.

    Raises RunRefusedError, which names the file, where it is not.
    """
    largest, at, digest = -1, -1, hashlib.sha256()
    for first in range(0, len(piece.tokens), BLOCK_TOKENS):
        block = piece.tokens[first : first + BLOCK_TOKENS]
        digest.update(block.tobytes())
        if (place := int(block.argmax())) >= 0 and int(block[place]) > largest:
            largest, at = int(block[place]), first + place
    index = piece.index
    if index and index.sha256 and index.sha256 != digest.hexdigest():
        raise RunRefusedError(f"{piece.path} is damaged: sha256 {digest.hexdigest()}, its index says {index.sha256}")
    proof = ", sha256 as in its index" if index and index.sha256 else ""
    return f"{piece.path}: largest id {largest:,} (token {at:,}){proof}"
