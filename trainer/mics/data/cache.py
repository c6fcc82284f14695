"""Data in S3, copied once to each node's own disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mics.data.files import files_below
from mics.errors import RunRefusedError
from mics.storage import is_s3, readable, s3, split_url

TOKEN_FILE_PARTS = (".bin", ".json", ".idx")  # tokens, and the index beside them


@dataclass(frozen=True)
class Thing:
    """One object of S3."""

    key: str
    size_bytes: int
    etag: str


def cache_folder(environment: Mapping[str, str]) -> Path:
    """MICS_CACHE: name a folder on the node's own fast disk. Pure but for the home folder."""
    return Path(environment.get("MICS_CACHE") or "~/.cache/mics").expanduser()


def on_this_disk(data: Iterable[str], folder: Path, *, copy: bool) -> tuple[str, ...]:
    """The names with each s3://bucket/prefix replaced by its copy below `folder`.

    copy  whether to make the copies; only one process of a node may, and the others wait for it elsewhere. A file that
          is there with the size and the etag that S3 tells is kept; another is fetched under another name first, so a
          broken transfer leaves no half file.

    Raises RunRefusedError where S3 has no such data, or the disk no room for it.
    """
    data = tuple(data)
    if copy and any(is_s3(name) for name in data):
        client = s3()
        for name in filter(is_s3, data):
            _copy(client, name, folder)
    return tuple(str(_place(name, folder)) if is_s3(name) else name for name in data)


def _place(url: str, folder: Path) -> Path:
    bucket, key = split_url(url)
    if ".." in PurePosixPath(key).parts:
        raise RunRefusedError(f"train.data: {url} cannot be a path on this disk")
    return folder / bucket / key.strip("/")


def _copy(client: Any, url: str, folder: Path) -> None:
    bucket, key = split_url(url)
    with readable(f"train.data: {url}"):
        things = _things(client, bucket, key.strip("/"))
        _forget_others(things, bucket, _place(url, folder), folder)
        wanted = [thing for thing in things if not _is_there(thing, bucket, folder)]
        _check_room(sum(thing.size_bytes for thing in wanted), folder, url)
        for thing in wanted:
            _fetch(client, bucket, thing, folder)


def _things(client: Any, bucket: str, key: str) -> list[Thing]:
    """The object of that name with what belongs beside it, or all objects below that folder, none hidden."""
    stem = key.removesuffix(".bin")
    named = {key} if stem == key else {stem + suffix for suffix in TOKEN_FILE_PARTS}
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=stem)
    found = [
        Thing(item["Key"], item["Size"], item["ETag"].strip('"'))
        for page in pages
        for item in page.get("Contents", ())
        if item["Key"] in named or (_below(item["Key"], key) and not item["Key"].endswith("/"))
    ]
    if not found:
        raise RunRefusedError(f"train.data: s3://{bucket}/{key} is not there")
    return found


def _below(name: str, folder: str) -> bool:
    inside = name.removeprefix(f"{folder}/") if folder else name
    hidden = any(part.startswith(".") for part in inside.split("/"))
    return (not folder or name.startswith(f"{folder}/")) and not hidden


def _is_there(thing: Thing, bucket: str, folder: Path) -> bool:
    path = _place(f"s3://{bucket}/{thing.key}", folder)
    mark = _mark(path)
    return (
        path.is_file() and path.stat().st_size == thing.size_bytes and mark.is_file() and mark.read_text() == thing.etag
    )


def _forget_others(things: Iterable[Thing], bucket: str, below: Path, folder: Path) -> None:
    """Remove copies of what S3 no longer has: the folder would bring them into the corpus."""
    known = {_place(f"s3://{bucket}/{thing.key}", folder) for thing in things}
    for path in files_below(below) if below.is_dir() else ():
        if path not in known and _mark(path).is_file():
            path.unlink()
            _mark(path).unlink()


def _mark(path: Path) -> Path:
    """Keeps the etag of a copy, which its bytes alone do not give."""
    return path.with_name(f".{path.name}.etag")


def _check_room(needed_bytes: int, folder: Path, url: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise RunRefusedError(
            f"train.data: {url} needs {needed_bytes:,} bytes in {folder}, {free_bytes:,} are free; "
            "name a larger disk in MICS_CACHE"
        )


def _fetch(client: Any, bucket: str, thing: Thing, folder: Path) -> None:
    path = _place(f"s3://{bucket}/{thing.key}", folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        client.download_file(bucket, thing.key, str(partial))
        if partial.stat().st_size != thing.size_bytes:
            raise RunRefusedError(f"train.data: s3://{bucket}/{thing.key} changed while it was copied")
        _mark(path).unlink(missing_ok=True)
        partial.replace(path)
        _mark(path).write_text(thing.etag)
    except OSError as error:
        raise RunRefusedError(f"train.data: s3://{bucket}/{thing.key} cannot be copied to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
