"""Text to token ids: its bytes, or a tokenizer.json of Hugging Face's `tokenizers` (an extra)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mics.errors import RunRefusedError

BYTES = "bytes"
BYTE_VALUES = 256
# The names that the well-known vocabularies give to the end of a document, the more telling ones first.
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Vocabulary:
    """What the index of a token file says of its tokenizer."""

    tokenizer: str
    sha256: str | None
    size: int
    end: int

    @property
    def dtype(self) -> str:
        """The narrowest that holds every id."""
        return "uint8" if self.size <= 1 << 8 else "uint16" if self.size <= 1 << 16 else "uint32"


def vocabulary_of(tokenizer: str, end: str | None) -> Vocabulary:
    """The vocabulary of "bytes" (a document ends with byte 0, which text does not hold), or of a tokenizer.json.

    Raises RunRefusedError where there is no such file, or no such end-of-document token.
    """
    if tokenizer == BYTES:
        if end:
            raise RunRefusedError("--end goes with a tokenizer.json; with bytes a document ends with byte 0")
        return Vocabulary(BYTES, None, BYTE_VALUES, 0)
    ids: dict[str, int] = load_tokenizer(tokenizer).get_vocab(with_added_tokens=True)
    name = end or next((usual for usual in USUAL_ENDS if usual in ids), None)
    if name not in ids:
        what = f"no token {end!r}" if end else f"none of {', '.join(USUAL_ENDS)}"
        raise RunRefusedError(f"{tokenizer} has {what} to end a document with; name one of its tokens with --end")
    digest = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    return Vocabulary(Path(tokenizer).name, digest, max(ids.values()) + 1, ids[name])


@cache  # once in each process
def load_tokenizer(path: str) -> Any:
    """Raises RunRefusedError where it cannot be read or `tokenizers` is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RunRefusedError(
            f"{path} needs the `tokenizers` package: pip install 'micsctl[tokenizers]' (or use --tokenizer bytes)"
        ) from None
    if not Path(path).is_file():
        raise RunRefusedError(f"--tokenizer {path} is not there; name a tokenizer.json, or bytes")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises nothing more telling
        raise RunRefusedError(f"--tokenizer {path} is no tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(texts: list[bytes], tokenizer: str) -> list[NDArray[np.uint32]]:
    """The ids of each text, without special tokens. Raises UnicodeDecodeError where a text is not UTF-8."""
    strings = [text.decode() for text in texts]
    if tokenizer == BYTES:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in texts]
    encoded = load_tokenizer(tokenizer).encode_batch_fast(strings, add_special_tokens=False)
    return [np.array(one.ids, dtype=np.uint32) for one in encoded]
