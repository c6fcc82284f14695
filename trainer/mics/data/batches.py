"""Samples as the tensors that a model trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mics.data.corpus import BadTokenError, Corpus, outside
from mics.data.masking import mask_tokens
from mics.data.order import deal, windows_at, windows_of
from mics.models.built import IGNORED

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [micro_batch, sequence]
NOTHING = -1  # in place of a window: a row without a target


def load_batch(
    corpus: Corpus, samples: Sequence[int], *, sequence: int, seed: int, vocabulary: int, mask_token: int | None = None
) -> Batch:
    """Inputs and targets of the samples, int64 [len(samples), sequence]. IGNORED past the end of the corpus.

    mask_token  None: each token's target is the next one. Else masked language modelling: what is to be guessed
                depends on (seed, global sample index) only

    Raises BadTokenError, which names file and place, for an id outside [0, vocabulary): on a GPU it would only be an
    assertion somewhere later.
    """
    windows = windows_at(samples, windows=windows_of(corpus.size, sequence), seed=seed)
    return _batch(corpus, windows, samples, sequence=sequence, seed=seed, vocabulary=vocabulary, mask_token=mask_token)


def validation_batches(
    corpus: Corpus,
    *,
    sequences: int,
    sequence: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    vocabulary: int,
    mask_token: int | None = None,
) -> Iterator[Batch]:
    """The same sequences at every call, evenly spread over the corpus and dealt over the ranks.

    Every rank gets equally many batches of [micro_batch, sequence]; rows past the last sequence hold only IGNORED. So
    the sum of the losses over the number of targets, both over all ranks, depends on neither n nor micro_batch.
    """
    windows = windows_of(corpus.size, sequence)
    count = min(sequences, windows)
    accumulation = -(-count // (world_size * micro_batch))
    for samples in deal(0, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation):
        rows = np.array([sample * windows // count if sample < count else NOTHING for sample in samples])
        yield _batch(corpus, rows, samples, sequence=sequence, seed=0, vocabulary=vocabulary, mask_token=mask_token)


def _batch(
    corpus: Corpus,
    windows: NDArray[np.int64],
    samples: Sequence[int],
    *,
    sequence: int,
    seed: int,
    vocabulary: int,
    mask_token: int | None,
) -> Batch:
    text, lengths = _read(corpus, windows, sequence)
    bad = outside(text, vocabulary)
    if bad is not None:
        row, place = divmod(bad, sequence + 1)
        where = corpus.where(int(windows[row]) * sequence + place)
        raise BadTokenError(f"{where} is {text[row, place]}, the model's vocabulary is {vocabulary}")
    if mask_token is None:
        inputs, targets, counted = text[:, :-1], text[:, 1:], np.arange(sequence) < lengths[:, None] - 1
        inputs = np.where(counted, inputs, 0)
    else:
        targets = text[:, :-1]
        inputs, counted = mask_tokens(
            targets,
            np.minimum(lengths, sequence),
            samples,
            seed=seed,
            mask_token=mask_token,
            vocabulary=vocabulary,
        )
    return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.where(counted, targets, IGNORED))


def _read(corpus: Corpus, windows: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of each window and the one after it, [rows, sequence + 1], zeros past the end; and how many are."""
    text = np.zeros((len(windows), sequence + 1), dtype=np.int64)
    lengths = np.zeros(len(windows), dtype=np.int64)
    for row, window in enumerate(windows):
        if window != NOTHING:
            tokens = corpus.read(int(window) * sequence, sequence + 1)
            text[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
    return text, lengths
