"""Text to token files: in parallel, in the same order whatever the number of workers, whole or not at all."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mics.data.index import Index
from mics.data.tokenizer import Vocabulary, encode
from mics.data.units import Text, Unit, texts_of, units_of
from mics.errors import RunRefusedError

PARTS = ("train", "validation")
BATCH_BYTES = 1 << 20  # of text that one call of the tokenizer gets
COPY_BYTES = 8 << 20

Progress = Callable[[int, int], None]  # bytes of input done, bytes in all


@dataclass(frozen=True)
class Recipe:
    """What to do with each unit; sent to every worker."""

    tokenizer: str
    field: str
    vocabulary: Vocabulary
    validation: float  # share of the documents


@dataclass(frozen=True)
class Tally:
    """What is known of some tokens."""

    tokens: int = 0
    documents: int = 0
    largest: int = -1
    largest_at: int = -1

    def then(self, other: Tally) -> Tally:
        """Of these tokens and, behind them, those."""
        mine = self.largest >= other.largest
        return Tally(
            self.tokens + other.tokens,
            self.documents + other.documents,
            self.largest if mine else other.largest,
            self.largest_at if mine else self.tokens + other.largest_at,
        )


def prepare(paths: tuple[Path, ...], to: Path, recipe: Recipe, *, workers: int, progress: Progress) -> dict[str, Tally]:
    """Write the folder `to`: train.bin and, if documents are held out, validation.bin, each with its index.

    The folder appears once it is whole. Raises RunRefusedError for bad input; nothing is left then.
    """
    units = units_of(paths)
    parts = PARTS if recipe.validation else PARTS[:1]
    with _new_folder(to) as folder:
        tallies = _write(units, folder, recipe, parts, workers, progress)
        for part, tally in tallies.items():
            if not tally.tokens:
                raise RunRefusedError(
                    f"no document of {sum(t.documents for t in tallies.values())} fell to {part}; "
                    "give it more (--validation 0.3), or to hold out windows use train.validation.share"
                    if recipe.validation
                    else f"found no text in {len(paths)} files"
                )
    return tallies


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A folder of another name, renamed to `to` at the end, removed on any exception."""
    partial = to.with_name(f"{to.name}.partial")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunRefusedError(f"{to} is there already; name another folder, or remove it")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise RunRefusedError(
            f"{partial} is there: another prepare writes it now, or one was killed; in that case remove it"
        ) from None
    try:
        yield partial
        partial.replace(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    units: list[Unit], folder: Path, recipe: Recipe, parts: tuple[str, ...], workers: int, progress: Progress
) -> dict[str, Tally]:
    tallies = {part: Tally() for part in parts}
    digests = {part: hashlib.sha256() for part in parts}
    files = {part: (folder / f"{part}.bin").open("wb") for part in parts}
    try:
        with closing(_in_order(units, folder, recipe, workers, progress)) as made:
            for number, unit_tallies in enumerate(made):
                for part in parts:
                    tallies[part] = tallies[part].then(unit_tallies[part])
                    _move(_piece(folder, number, part), files[part], digests[part])
        for part, file in files.items():
            os.fsync(file.fileno())
            tally, v = tallies[part], recipe.vocabulary
            index = Index(
                dtype=v.dtype,
                part=part,
                tokens=tally.tokens,
                documents=tally.documents,
                vocabulary=v.size,
                largest=tally.largest,
                largest_at=tally.largest_at,
                end=v.end,
                tokenizer=v.tokenizer,
                tokenizer_sha256=v.sha256,
                sha256=digests[part].hexdigest(),
            )
            (folder / f"{part}.json").write_text(index.to_json())
    finally:
        for file in files.values():
            file.close()
    return tallies


def _piece(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number}.{part}"


def _move(piece: Path, file: IO[bytes], digest: hashlib._Hash) -> None:
    with piece.open("rb") as source:
        while block := source.read(COPY_BYTES):
            digest.update(block)
            file.write(block)
    file.flush()
    piece.unlink()


def _in_order(
    units: list[Unit], folder: Path, recipe: Recipe, workers: int, progress: Progress
) -> Generator[dict[str, Tally], None, None]:
    """What was made of each unit, in order, as soon as it and all before it are done."""
    total, done_bytes = sum(unit.input_bytes for unit in units), 0
    others = multiprocessing.active_children()
    # Not forked: a copy of a process with threads may hang, and macOS has no safe fork.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_die_on_signals)
    try:
        futures = {executor.submit(encode_unit, unit, n, folder, recipe): n for n, unit in enumerate(units)}
        running: set[Future[dict[str, Tally]]] = set(futures)
        ready: dict[int, dict[str, Tally]] = {}
        following = 0
        progress(0, total)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                ready[futures[future]] = future.result()
                done_bytes += units[futures[future]].input_bytes
            progress(done_bytes, total)
            while following in ready:
                yield ready.pop(following)
                following += 1
    except BrokenProcessPool as error:
        raise RunRefusedError(f"a worker was killed (out of memory?); try fewer with --workers: {error}") from error
    except BaseException:  # Ctrl-C, a bad line, a full disk: nobody waits for the rest
        for child in set(multiprocessing.active_children()) - set(others):
            child.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _die_on_signals() -> None:
    """The parent cleans up; a worker that told its own story would only disturb."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores


def encode_unit(unit: Unit, number: int, folder: Path, recipe: Recipe) -> dict[str, Tally]:
    """Runs in a worker: writes the tokens of one unit into one file per part."""
    tallies = dict.fromkeys(PARTS, Tally())
    files = {part: _piece(folder, number, part).open("wb") for part in (PARTS if recipe.validation else PARTS[:1])}
    try:
        for texts in _batches(texts_of(unit, recipe.field)):
            ids = encode([text.content for text in texts], recipe.tokenizer)
            for text, tokens in zip(texts, ids, strict=True):
                if not len(tokens) and not (text.ends and not unit.has_json_lines):
                    continue  # an empty document
                part = PARTS[_is_held_out(text.document, recipe.validation)]
                ended = np.append(tokens, recipe.vocabulary.end) if text.ends else tokens
                at = int(ended.argmax())
                tallies[part] = tallies[part].then(Tally(len(ended), int(text.ends), int(ended[at]), at))
                files[part].write(ended.astype(f"<{np.dtype(recipe.vocabulary.dtype).str[1:]}").tobytes())
    except UnicodeDecodeError as error:
        near = bytes(error.object[max(0, error.start - 20) : error.end + 20])
        raise RunRefusedError(f"{unit.path} is no UTF-8 text: {error.reason} in {near!r}") from error
    except OSError as error:
        raise RunRefusedError(f"{unit.path}: {error}") from error
    except EOFError as error:
        raise RunRefusedError(f"{unit.path} is cut short: {error}") from error
    finally:
        for file in files.values():
            file.close()
    return tallies


def _is_held_out(document: bytes, share: float) -> bool:
    """By what the document is, so that equal ones stay together and others may be added."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _batches(texts: Iterator[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
