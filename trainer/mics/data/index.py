"""The index beside a token file of our own: NAME.json beside NAME.bin. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mics.errors import RunRefusedError

FORMAT = "mics tokens 1"
DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True)
class Index:
    """What prepare knows of a token file. Write {"dtype": "uint32"} beside somebody else's file to say its type.

    Unknown things are None. largest_at is the position of the largest token id; sha256 is that of the token file.
    """

    dtype: str
    format: str = FORMAT
    part: str | None = None  # "train" or "validation": never to be mixed
    tokens: int | None = None
    documents: int | None = None
    vocabulary: int | None = None
    largest: int | None = None
    largest_at: int | None = None
    end: int | None = None  # id of the token after each document
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    sha256: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def index_path(tokens: Path) -> Path:
    return tokens.with_suffix(".json")


def read_index(path: Path) -> Index:
    """Raises RunRefusedError, which names the file, for one that is no index."""
    try:
        raw = json.loads(path.read_text())
        index = Index(**raw)
    except (OSError, ValueError, TypeError) as error:
        raise RunRefusedError(f"{path} is no index of a token file: {error}") from error
    kinds = {field.name: (str if "str" in str(field.type) else int) for field in fields(Index)}
    wrong = [name for name, value in asdict(index).items() if value is not None and type(value) is not kinds[name]]
    if wrong or index.dtype not in DTYPES or index.format != FORMAT:
        what = wrong[0] if wrong else "dtype" if index.dtype not in DTYPES else "format"
        raise RunRefusedError(f"{path}: {what} {asdict(index)[what]!r} is not what an index of {FORMAT!r} holds")
    return index
