"""The data of a run, from its train: section."""

import json

import numpy as np
import pytest
from mics.config import TrainConfig, ValidationConfig
from mics.data.order import windows_of
from mics.data.run import mask_token_of, open_data
from mics.errors import RunRefusedError
from mics.shapes import ModelShape


def opened(data, *, validation=None, vocabulary=256, sequence=16, global_batch=8, environment=None):
    train = TrainConfig(
        model=ModelShape(hidden=12, layers=2, heads=3, positions=64),
        data=tuple(str(name) for name in data),
        sequence=sequence,
        validation=validation or ValidationConfig(),
    )
    limits = {"vocabulary": vocabulary, "global_batch": global_batch, "rank": 0, "world_size": 1}
    return open_data(train, environment or {}, **limits)


def test_without_validation_everything_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    data = opened([tmp_path])
    assert (data.train.size, data.validation) == (1000, None)


def test_a_share_is_held_out_or_own_data_taken(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1601)
    (tmp_path / "b.txt").write_text("y" * 100)
    data = opened([tmp_path / "a.txt"], validation=ValidationConfig(every=1, share=0.1))
    assert (windows_of(data.train.size, 16), windows_of(data.validation.size, 16)) == (90, 10)
    data = opened([tmp_path / "a.txt"], validation=ValidationConfig(every=1, data=(str(tmp_path / "b.txt"),)))
    assert (data.train.size, data.validation.size) == (1601, 100)


def test_what_two_nodes_compare_sees_both(tmp_path):
    validation = ValidationConfig(every=1, data=(str(tmp_path / "b.txt"),))
    (tmp_path / "a.txt").write_text("x" * 1601)
    summaries = set()
    for text in ("y" * 100, "z" * 100):
        (tmp_path / "b.txt").write_text(text)
        summaries.add(opened([tmp_path / "a.txt"], validation=validation).summary())
    assert len(summaries) == 2


def test_data_in_s3_is_read_from_the_copy(tmp_path):
    (tmp_path / "bucket/corpus").mkdir(parents=True)
    (tmp_path / "bucket/corpus/a.txt").write_text("x" * 1000)
    assert opened(["s3://bucket/corpus"], environment={"MICS_CACHE": str(tmp_path)}).train.size == 1000


def test_validation_data_is_held_to_the_same_rules(tmp_path):
    def tokens(name, ids, **index):
        (tmp_path / name).write_bytes(np.array(ids, dtype="<u2").tobytes())
        (tmp_path / name).with_suffix(".json").write_text(json.dumps({"dtype": "uint16", **index}))
        return str(tmp_path / name)

    def refusal(validation, **limits):
        with pytest.raises(RunRefusedError) as error:
            opened([train], validation=ValidationConfig(every=1, data=(validation,)), **limits)
        return str(error.value)

    train = tokens("train.bin", [1] * 999, tokenizer_sha256="a", part="train")
    assert "different tokenizers" in refusal(tokens("other.bin", [1] * 99, tokenizer_sha256="b"))
    assert "token 3 is 300" in refusal(tokens("large.bin", [1, 1, 1, 300] * 9, tokenizer_sha256="a"))
    assert "train.validation.data: the corpus is too short" in refusal(tokens("short.bin", [1] * 9))
    (tmp_path / "text").write_text("x" * 99)
    assert "one is text and one holds tokens" in refusal(str(tmp_path / "text"))
    assert refusal(str(tmp_path / "no")).startswith("train.validation.data: ")
    good = tokens("good.bin", [1] * 99, tokenizer_sha256="a", part="validation")
    assert opened([train], validation=ValidationConfig(every=1, data=(good,))).validation.size == 99


def test_what_is_left_after_a_share_is_held_out_must_do_for_a_step(tmp_path):
    (tmp_path / "a.txt").write_text("x" * (8 * 16 + 1))
    assert opened([tmp_path]).train.size == 129
    with pytest.raises(RunRefusedError, match="found 113 bytes, one step needs 129"):
        opened([tmp_path], validation=ValidationConfig(every=1))


def test_the_mask_token_is_the_last_of_the_vocabulary_or_the_given_one():
    assert mask_token_of(TrainConfig(), vocabulary=256, masked=False) is None
    assert mask_token_of(TrainConfig(), vocabulary=256, masked=True) == 255
    assert mask_token_of(TrainConfig(mask_token=103), vocabulary=256, masked=True) == 103
    with pytest.raises(RunRefusedError, match=r"train\.mask_token: 256 is no id"):
        mask_token_of(TrainConfig(mask_token=256), vocabulary=256, masked=True)
