"""Samples as tensors: next tokens, masked tokens, validation."""

import numpy as np
import pytest
import torch
from mics.data.batches import load_batch, validation_batches
from mics.data.corpus import BadTokenError, open_corpus
from mics.data.masking import mask_tokens
from mics.data.order import deal, windows_of
from mics.models.built import IGNORED


@pytest.fixture
def counting(tmp_path):
    """counting(size): a corpus that counts 0, 1, 2, ..."""

    def make(size):
        (tmp_path / "tokens.bin").write_bytes(np.arange(size, dtype="<u2").tobytes())
        return open_corpus([tmp_path / "tokens.bin"])

    return make


def test_targets_are_the_next_tokens_and_end_with_the_corpus(counting):
    corpus = counting(11)  # windows of 4, 4 and 2 targets
    assert windows_of(corpus.size, 4) == 3
    inputs, targets = load_batch(corpus, range(3), sequence=4, seed=0, vocabulary=11)
    rows = sorted(zip(inputs.tolist(), targets.tolist(), strict=True), reverse=True)
    assert rows == [
        ([8, 9, 0, 0], [9, 10, IGNORED, IGNORED]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
    ]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("mask_token", [None, 1999])
def test_a_run_that_goes_on_with_other_numbers_reads_what_an_undisturbed_one_reads(counting, mask_token):
    """Twelve windows of 2000 tokens, 36 samples: three epochs, cut in two ways."""
    corpus = counting(2000)
    sequence = 170

    def read(first, world_size, micro_batch, accumulation):
        dealt = [
            deal(first, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation)
            for rank in range(world_size)
        ]
        rows = {}
        for samples in (samples for rank in dealt for samples in rank):
            batch = load_batch(corpus, samples, sequence=sequence, seed=5, vocabulary=2000, mask_token=mask_token)
            rows |= {sample: (i.tolist(), t.tolist()) for sample, i, t in zip(samples, *batch, strict=True)}
        return rows

    assert windows_of(corpus.size, sequence) == 12
    undisturbed = read(0, 1, 4, 9)
    assert undisturbed == read(0, 2, 3, 1) | read(6, 4, 1, 3) | read(18, 1, 2, 4) | read(26, 5, 2, 1)
    assert list(undisturbed) == list(range(36))
    if mask_token is None:
        firsts = [undisturbed[sample][0][0] for sample in range(36)]
        assert [sorted(firsts[i : i + 12]) for i in (0, 12, 24)] == [[w * sequence for w in range(12)]] * 3
        assert firsts[:12] != firsts[12:24]


@pytest.mark.parametrize("mask_token", [None, 5])
def test_an_id_outside_the_vocabulary_never_reaches_the_model(counting, mask_token):
    with pytest.raises(BadTokenError, match=r"tokens\.bin: token 90 is 90, the model's vocabulary is 90"):
        load_batch(counting(100), range(4), sequence=25, seed=0, vocabulary=90, mask_token=mask_token)


def masked(rows=2000, sequence=100, vocabulary=1000, seed=0, first=0, lengths=None):
    tokens = np.full((rows, sequence), 7, dtype=np.int64)
    counts = np.full(rows, sequence) if lengths is None else np.array(lengths)
    samples = range(first, first + rows)
    return mask_tokens(tokens, counts, samples, seed=seed, mask_token=999, vocabulary=vocabulary)


def test_masking_is_berts():
    seen, chosen = masked()
    assert (chosen.sum(axis=1) == 15).all()
    hidden, kept = (seen[chosen] == 999).mean(), (seen[chosen] == 7).mean()
    assert (seen[~chosen] == 7).all()
    assert hidden == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.1, abs=0.01)
    replaced = seen[chosen & (seen != 999) & (seen != 7)]
    assert (replaced.min(), replaced.max()) >= (0, 990)
    assert len(set(replaced.tolist())) > 900  # of 1000 ids, about 3000 draws
    assert chosen.sum(axis=0) == pytest.approx(300, abs=90)  # no place is preferred


def test_masks_differ_between_samples_epochs_and_seeds_and_come_again():
    def chosen(**changes):
        return masked(rows=4, **changes)[1].tolist()

    assert chosen() == chosen()
    assert chosen() != chosen(first=4)
    assert chosen() != chosen(seed=1)
    assert len({tuple(row) for row in chosen()}) == 4


def test_short_rows_are_masked_inside_their_text_and_at_least_once():
    seen, chosen = masked(rows=4, sequence=20, lengths=[0, 1, 3, 20])
    assert chosen.sum(axis=1).tolist() == [0, 1, 1, 3]
    assert not chosen[1, 1:].any()
    assert not chosen[2, 3:].any()
    assert (seen[0] == 7).all()


def test_a_masked_batch_asks_for_the_chosen_tokens_only(counting):
    corpus = counting(401)
    inputs, targets = load_batch(corpus, range(4), sequence=100, seed=0, vocabulary=500, mask_token=499)
    asked = targets != IGNORED
    assert asked.sum(dim=1).tolist() == [15] * 4
    windows = inputs[~asked]
    place = torch.arange(100).expand(4, 100)
    start = (inputs - place)[~asked].reshape(4, 85)[:, :1]
    assert torch.equal(targets[asked], (start + place)[asked])  # what stood there, whatever is shown instead
    assert windows.max() < 401


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 4), (3, 2), (4, 3), (8, 1)])
@pytest.mark.parametrize("mask_token", [None, 1999])
def test_validation_is_the_same_on_any_number_of_ranks(counting, world_size, micro_batch, mask_token):
    corpus = counting(2001)  # one token behind the last window: it is no sequence

    def rows(world_size, micro_batch):
        batches = [
            list(
                validation_batches(
                    corpus,
                    sequences=10,
                    sequence=50,
                    rank=rank,
                    world_size=world_size,
                    micro_batch=micro_batch,
                    vocabulary=2001,
                    mask_token=mask_token,
                )
            )
            for rank in range(world_size)
        ]
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert {tuple(inputs.shape) for of_rank in batches for inputs, _ in of_rank} == {(micro_batch, 50)}
        found = [
            (i.tolist(), t.tolist()) for of_rank in batches for batch in of_rank for i, t in zip(*batch, strict=True)
        ]
        return sorted(row for row in found if set(row[1]) != {IGNORED})

    assert rows(world_size, micro_batch) == rows(1, 10)
    assert len(rows(world_size, micro_batch)) == 10


def test_validation_takes_no_more_sequences_than_there_are_and_spreads_them(counting):
    def firsts(size, sequences):
        settings = {"sequence": 10, "rank": 0, "world_size": 1, "micro_batch": 1, "vocabulary": 2000}
        batches = validation_batches(counting(size), sequences=sequences, **settings)
        return [int(inputs[0, 0]) for inputs, _ in batches]

    assert firsts(41, 64) == [0, 10, 20, 30]
    assert firsts(1001, 4) == [0, 250, 500, 750]
