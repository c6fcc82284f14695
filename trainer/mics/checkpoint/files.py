"""A store as torch's distributed checkpoint sees it, with a checksum of everything that is written through it."""

from __future__ import annotations

import io
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mics.checkpoint.marks import FileSum
from mics.checkpoint.stores import Store

_CHUNK_BYTES = 8 << 20


class Summed(io.RawIOBase):
    """A stream that is written from front to end, and the CRC-32 of its bytes."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner
        self.size_bytes = 0
        self.crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._inner.write(data)
        view = memoryview(data)
        self.crc = zlib.crc32(view, self.crc)
        self.size_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._inner.flush()


class StoreFiles(FileSystemBase):
    """`sums`: what this process has written, by file name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with self._store.stream(path, mode) as stream:
                yield stream
            return
        try:
            with self._store.stream(path, mode) as stream:
                summed = Summed(stream)
                yield summed
        except OSError as error:  # writing names no file
            raise OSError(error.errno, error.strerror or str(error), self._store.path(path)) from error
        self.sums[_file_name(path)] = FileSum(summed.size_bytes, f"{summed.crc:08x}")

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        self._store.rename(path, new_path)
        self.sums[_file_name(new_path)] = self.sums.pop(_file_name(path))

    def init_path(self, path: Any) -> str:
        return str(path)

    def mkdir(self, path: Any) -> None:
        self._store.make_folder(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str)

    def exists(self, path: Any) -> bool:
        return self._store.exists(path)

    def rm_file(self, path: Any) -> None:
        self._store.remove_file(path)


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


def crc32_of(store: Store, name: str) -> str:
    """Of the file as it lies in the store."""
    crc = 0
    with store.stream(name, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


class StoreWriter(FileSystemWriter):
    """Writes one file a rank into `folder` of a store."""

    def __init__(self, store: Store, folder: str) -> None:
        # The store's streams are durable once closed. Copying ahead would open a CUDA context on GPU 0 in this thread.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs: StoreFiles = StoreFiles(store)  # type: ignore[assignment]  # as torch's own FsspecWriter does
        self.path = folder


class StoreReader(FileSystemReader):
    """Reads of each file only the tensors that the plan names, from front to end, each saved chunk once."""

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(folder)
        self.fs: StoreFiles = StoreFiles(store)  # type: ignore[assignment]
        self.path = folder

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests: dict[tuple[str, int, int], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            saved = self.storage_data[item.storage_index]
            requests[saved.relative_path, saved.offset, saved.length].append(item)
        files: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for file, offset, length in sorted(requests):
            files[file].append((offset, length))
        for file, chunks in files.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, file), "rb") as stream:
                for offset, length in chunks:
                    stream.seek(offset)
                    _give(requests[file, offset, length], io.BytesIO(stream.read(length)), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _give(items: list[ReadItem], chunk: io.BytesIO, planner: LoadPlanner) -> None:
    """Copy one saved chunk to where the items want their parts of it."""
    tensor = torch.load(chunk, map_location="cpu", weights_only=True)
    for item in items:
        assert item.type == LoadItemType.TENSOR  # states.py saves nothing else
        part = tensor
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(axis, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)
