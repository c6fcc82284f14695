"""The data of one run, as its `train:` section names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mics.config import TrainConfig
from mics.data.cache import cache_folder, on_this_disk
from mics.data.corpus import Corpus, check_corpus, check_same_tokens, check_tokens, open_corpus, split
from mics.data.files import find_files
from mics.errors import RunRefusedError

VALIDATION = "train.validation.data"


@dataclass(frozen=True)
class RunData:
    """What is trained on, and what is held out (None: the run does not validate)."""

    train: Corpus
    validation: Corpus | None

    def summary(self) -> str:
        """The same on two nodes only if their data are (see `Corpus.digest`)."""
        parts = [corpus for corpus in (self.train, self.validation) if corpus]
        return " and ".join(
            f"{len(part.pieces)} files, {part.size} {part.unit}, sha256 {part.digest()}" for part in parts
        )


def copy_data(train: TrainConfig, environment: Mapping[str, str]) -> None:
    """Copy what lies in S3 to this node; for one process of a node, before any opens it. Raises RunRefusedError."""
    on_this_disk((*train.data, *train.validation.data), cache_folder(environment), copy=True)


def open_data(
    train: TrainConfig,
    environment: Mapping[str, str],
    *,
    vocabulary: int,
    global_batch: int,
    rank: int,
    world_size: int,
) -> RunData:
    """Raises RunRefusedError where the run cannot use its data; the ranks share the look at token ids."""

    def opened(names: tuple[str, ...], key: str) -> Corpus:
        local = on_this_disk(names, cache_folder(environment), copy=False)
        corpus = open_corpus(find_files(local, environment, key))
        check_tokens(corpus, vocabulary=vocabulary, rank=rank, world_size=world_size)
        return corpus

    def checked(corpus: Corpus, sequences: int, key: str) -> None:
        check_corpus(corpus, vocabulary=vocabulary, sequence=train.sequence, global_batch=sequences, key=key)

    v, whole = train.validation, opened(train.data, "train.data")
    checked(whole, global_batch, "train.data")
    if not v.every:
        return RunData(whole, None)
    if v.data:
        validation = opened(v.data, VALIDATION)
        checked(validation, 1, VALIDATION)
        check_same_tokens(whole, validation)
        return RunData(whole, validation)
    rest, validation = split(whole, v.share, train.sequence)
    checked(rest, global_batch, "train.data without what train.validation.share holds out")
    return RunData(rest, validation)


def mask_token_of(train: TrainConfig, *, vocabulary: int, masked: bool) -> int | None:
    """The id that hides a token, None for a model that predicts the next one. Raises RunRefusedError for no id. Pure.

    auto: the last of the vocabulary. (Of bytes that is 255, which UTF-8 text does not hold.)
    """
    if not masked:
        return None
    token = vocabulary - 1 if train.mask_token == "auto" else train.mask_token
    if not 0 <= token < vocabulary:
        raise RunRefusedError(f"train.mask_token: {token} is no id of the model's vocabulary of {vocabulary}")
    return token
