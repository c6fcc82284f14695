"""One file of the corpus, whatever wrote it: recognised, checked against its own header or index, and mapped.

NAME.bin + NAME.json   ours (`python -m mics.data prepare`), or anybody's with the type of its tokens in the index
NAME.bin + NAME.idx    Megatron's MMapIndexedDataset
NAME.bin               llm.c's, by the magic number of its header; otherwise nanoGPT's: uint16 and nothing else
anything else          text: each byte is a token
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mics.data.index import Index, index_path, read_index
from mics.errors import RunRefusedError

Tokens = NDArray[Any]  # of an integer type, [count], mapped

# Magic number, version and type of llm.c's headers: 256 int32, of which the third is the number of tokens
# (dev/data/data_common.py in karpathy/llm.c).
LLMC_HEADER_BYTES = 1024
LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}

# Megatron's index: magic, version, type of the tokens, number of sequences, entries of the document list; then a size
# (int32, tokens) and a pointer (int64, bytes) for each sequence, then the list
# (megatron/core/datasets/indexed_dataset.py in NVIDIA/Megatron-LM).
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SEQUENCES_AT_ONCE = 1 << 20

# Python's mmap holds a file descriptor per file, torch's does not. But torch's counts as memory that may be written,
# and Linux refuses that for a file larger than the machine's memory.
SMALL_BYTES = 64 << 20

PREPARE_FIRST = {
    ".jsonl",
    ".ndjson",
    ".gz",
    ".zst",
    ".xz",
    ".bz2",
    ".zip",
    ".parquet",
    ".arrow",
    ".npy",
    ".pkl",
    ".idx",
}


@dataclass(frozen=True)
class TokenFile:
    """One file, mapped: its memory is shared by the ranks of a node and filled on demand."""

    path: Path
    kind: str  # "text", "nanogpt", "llm.c", "megatron", "mics"
    tokens: Tokens
    begin: int = 0  # place in the file of tokens[0]
    documents: int | None = None
    index: Index | None = None

    @property
    def is_text(self) -> bool:
        return self.kind == "text"


def open_file(path: Path) -> TokenFile:
    """Raises RunRefusedError, which names the file, for one that is cut short or contradicts itself."""
    try:
        if path.suffix in PREPARE_FIRST:
            raise RunRefusedError(f"{path} is neither text nor tokens; run python -m mics.data prepare on it first")
        return _open_tokens(path) if path.suffix == ".bin" else TokenFile(path, "text", _map(path))
    except (OSError, RuntimeError) as error:
        raise RunRefusedError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _open_tokens(path: Path) -> TokenFile:
    raw = _map(path)
    if path.with_suffix(".idx").is_file():
        return _megatron(path, raw)
    if index_path(path).is_file():
        index = read_index(index_path(path))
        tokens = _view(path, raw, f"<{index.dtype.replace('int', '')[0]}{np.dtype(index.dtype).itemsize}")
        if index.tokens not in (None, len(tokens)):
            raise _torn(path, f"its index says {index.tokens:,} tokens", len(tokens))
        return TokenFile(path, "mics", tokens, documents=index.documents, index=index)
    header = raw[:LLMC_HEADER_BYTES].view("<i4") if len(raw) >= LLMC_HEADER_BYTES else np.zeros(3, dtype="<i4")
    kind = LLMC.get((int(header[0]), int(header[1])))
    if kind:
        tokens = _view(path, raw[LLMC_HEADER_BYTES:], kind)
        if len(tokens) != header[2]:
            raise _torn(path, f"its header says {int(header[2]):,} tokens", len(tokens))
        return TokenFile(path, "llm.c", tokens)
    return TokenFile(path, "nanogpt", _view(path, raw, "<u2"))


def _megatron(path: Path, raw: Tokens) -> TokenFile:
    index, beside = _map(path.with_suffix(".idx")), path.with_suffix(".idx")
    if len(index) < MEGATRON_HEADER.size:
        raise RunRefusedError(f"{beside} is cut short: {len(index)} bytes")
    magic, version, code, sequences, entries = MEGATRON_HEADER.unpack(index[: MEGATRON_HEADER.size].tobytes())
    if magic != MEGATRON_MAGIC or version != 1 or code not in MEGATRON_TYPES:
        raise RunRefusedError(f"{beside} is no index of Megatron's version 1 over whole numbers")
    sizes_end = MEGATRON_HEADER.size + 4 * sequences
    pointers_end = sizes_end + 8 * sequences
    if len(index) < pointers_end + 8 * entries:
        raise RunRefusedError(f"{beside} is cut short: {len(index):,} of {pointers_end + 8 * entries:,} bytes")
    sizes, pointers = index[MEGATRON_HEADER.size : sizes_end].view("<i4"), index[sizes_end:pointers_end].view("<i8")
    tokens, expected = _view(path, raw, MEGATRON_TYPES[code]), 0
    for first in range(0, sequences, SEQUENCES_AT_ONCE):
        part = slice(first, first + SEQUENCES_AT_ONCE)
        ends = expected + np.cumsum(sizes[part], dtype=np.int64) * tokens.itemsize
        if (sizes[part] < 0).any() or (ends - sizes[part] * np.int64(tokens.itemsize) != pointers[part]).any():
            raise RunRefusedError(f"{beside}: its sequences do not lie one after the other")
        expected = int(ends[-1])
    if expected != len(raw):
        raise _torn(path, f"its index says {expected // tokens.itemsize:,} tokens", len(tokens))
    return TokenFile(path, "megatron", tokens, documents=max(0, entries - 1))


def _torn(path: Path, says: str, found: int) -> RunRefusedError:
    return RunRefusedError(f"{path} is cut short or not what it says: {says}, the file holds {found:,}")


def _view(path: Path, raw: Tokens, kind: str) -> Tokens:
    width = np.dtype(kind).itemsize
    if len(raw) % width:
        raise RunRefusedError(f"{path} is cut short: {len(raw):,} bytes are no whole number of {width}-byte tokens")
    return raw.view(kind)


def _map(path: Path) -> Tokens:
    """The bytes of a file."""
    size = path.stat().st_size
    if not size:
        return np.zeros(0, dtype=np.uint8)
    if size <= SMALL_BYTES:
        small: Tokens = torch.from_file(str(path), size=size, dtype=torch.uint8).numpy()
        return small
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
