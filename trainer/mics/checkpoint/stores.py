"""Where checkpoints lie: a folder that every node sees, or s3://bucket/prefix. Names below it are joined by "/"."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mics.checkpoint.marks import MARK
from mics.storage import S3Client, is_s3, open_s3, readable, s3, split_url

_DELETE_AT_ONCE = 1000  # objects, S3's limit


class Store(ABC):
    """One folder with folders of files below it. Errors are OSError, or RunRefusedError where S3 refuses."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.location}/{name}" if name else self.location

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders directly below; empty where there is nothing."""

    @abstractmethod
    def sizes_bytes(self, folder: str) -> dict[str, int]:
        """Size of each file directly in `folder`; empty where there is none."""

    @abstractmethod
    def stream(self, name: str, mode: str) -> Any:
        """A context with the open binary stream, "rb" or "wb". What was written is durable after it."""

    @abstractmethod
    def rename(self, name: str, new_name: str) -> None: ...

    @abstractmethod
    def make_folder(self, name: str) -> None: ...

    @abstractmethod
    def remove_file(self, name: str) -> None: ...

    @abstractmethod
    def remove_folder(self, name: str) -> None:
        """The mark first: what is left of an interrupted removal is not taken for a checkpoint."""

    @abstractmethod
    def drop_unfinished(self) -> None:
        """Forget what writers that died were about to write. No writer may be at work below this store."""

    def exists(self, name: str) -> bool:
        folder, _, file = name.rpartition("/")
        return file in self.sizes_bytes(folder)

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where there is none."""
        with self.stream(name, "rb") as stream:
            content: bytes = stream.read()
        return content

    def write(self, name: str, content: bytes) -> None:
        """The file appears with all of its content or not at all."""
        partial = f"{name}.partial"
        with self.stream(partial, "wb") as stream:
            stream.write(content)
        self.rename(partial, name)


class DiskStore(Store):
    def folders(self) -> list[str]:
        root = Path(self.location)
        return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []

    def sizes_bytes(self, folder: str) -> dict[str, int]:
        root = Path(self.path(folder))
        return {path.name: path.stat().st_size for path in root.iterdir() if path.is_file()} if root.is_dir() else {}

    @contextmanager
    def stream(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        with Path(self.path(name)).open(mode) as stream:
            yield stream
            if mode == "wb":
                stream.flush()
                os.fsync(stream.fileno())

    def rename(self, name: str, new_name: str) -> None:
        os.replace(self.path(name), self.path(new_name))
        folder = os.open(Path(self.path(new_name)).parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name too survives a crash of the machine
        finally:
            os.close(folder)

    def make_folder(self, name: str) -> None:
        Path(self.path(name)).mkdir(parents=True, exist_ok=True)

    def remove_file(self, name: str) -> None:
        Path(self.path(name)).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        self.remove_file(f"{name}/{MARK}")
        shutil.rmtree(self.path(name))

    def drop_unfinished(self) -> None:
        """Nothing to do: what a dead writer left lies in the folder of its checkpoint."""


class S3Store(Store):
    def __init__(self, location: str, client: S3Client) -> None:
        super().__init__(location)
        self._client = client
        self._bucket, prefix = split_url(self.location)
        self._prefix = f"{prefix}/" if prefix else ""  # with its slash: run "a" must not see run "ab"

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _pages(self, operation: str, part: str, **more: str) -> Iterator[Any]:
        with readable(self.location):
            pages = self._client.get_paginator(operation).paginate(Bucket=self._bucket, **more)
            for page in pages:
                yield from page.get(part, ())

    def folders(self) -> list[str]:
        found = self._pages("list_objects_v2", "CommonPrefixes", Prefix=self._prefix, Delimiter="/")
        return sorted(entry["Prefix"].removeprefix(self._prefix).rstrip("/") for entry in found)

    def sizes_bytes(self, folder: str) -> dict[str, int]:
        prefix = self._key(f"{folder}/" if folder else "")
        found = self._pages("list_objects_v2", "Contents", Prefix=prefix, Delimiter="/")
        return {entry["Key"].removeprefix(prefix): entry["Size"] for entry in found}

    @contextmanager
    def stream(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        with readable(self.path(name)), open_s3(self._client, self.path(name), mode) as stream:
            yield stream

    def rename(self, name: str, new_name: str) -> None:
        with readable(self.path(new_name)):
            source = {"Bucket": self._bucket, "Key": self._key(name)}
            self._client.copy_object(Bucket=self._bucket, Key=self._key(new_name), CopySource=source)
        self.remove_file(name)

    def write(self, name: str, content: bytes) -> None:
        with readable(self.path(name)):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def make_folder(self, name: str) -> None:
        """S3 has none."""

    def remove_file(self, name: str) -> None:
        with readable(self.path(name)):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def remove_folder(self, name: str) -> None:
        self.remove_file(f"{name}/{MARK}")
        keys = (entry["Key"] for entry in self._pages("list_objects_v2", "Contents", Prefix=self._key(f"{name}/")))
        for some in _batches(keys):
            with readable(self.path(name)):
                wanted = {"Objects": [{"Key": key} for key in some], "Quiet": True}
                self._client.delete_objects(Bucket=self._bucket, Delete=wanted)

    def drop_unfinished(self) -> None:
        for upload in self._pages("list_multipart_uploads", "Uploads", Prefix=self._prefix):
            with readable(self.location):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(keys)
    while some := list(islice(iterator, _DELETE_AT_ONCE)):
        yield some


def open_store(location: str) -> Store:
    """The store at an absolute folder or s3://bucket/prefix. Raises RunRefusedError where S3 cannot be used."""
    return S3Store(location, s3()) if is_s3(location) else DiskStore(location)
