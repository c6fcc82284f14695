"""The corpus, and which sample goes to which rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.data import (
    check_corpus,
    deal,
    find_files,
    load_batch,
    open_corpus,
    standard_library,
    window_of,
    windows_of,
)
from mics.errors import RunRefusedError
from mics.models.gpt import IGNORED

small = st.integers(1, 6)


@given(first=st.integers(0, 10**6), world_size=small, micro_batch=small, accumulation=small)
def test_a_global_batch_is_dealt_whole_and_once(first, world_size, micro_batch, accumulation):
    dealt = [
        sample
        for rank in range(world_size)
        for micro in deal(first, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation)
        for sample in micro
    ]
    assert sorted(dealt) == list(range(first, first + world_size * micro_batch * accumulation))


@given(world_size=small, micro_batch=small, accumulation=small)
def test_every_rank_gets_the_same_number_of_full_micro_steps(world_size, micro_batch, accumulation):
    for rank in range(world_size):
        dealt = deal(0, rank=rank, world_size=world_size, micro_batch=micro_batch, accumulation=accumulation)
        assert [len(micro) for micro in dealt] == [micro_batch] * accumulation


@settings(deadline=None)
@given(windows=st.integers(1, 300), epoch=st.integers(0, 5), seed=st.integers(0, 2**40))
def test_an_epoch_reads_every_window_once(windows, epoch, seed):
    samples = range(epoch * windows, (epoch + 1) * windows)
    assert sorted(window_of(sample, windows=windows, seed=seed) for sample in samples) == list(range(windows))


def test_the_order_depends_on_the_seed_and_the_epoch_and_is_no_run_of_neighbours():
    def order(seed, epoch):
        return [window_of(epoch * 1000 + i, windows=1000, seed=seed) for i in range(1000)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sum(abs(a - b) == 1 for a, b in zip(order(0, 0), order(0, 0)[1:], strict=False)) < 10


def test_the_standard_library_is_real_text_and_only_pythons_own():
    names = [path.name for path in standard_library()]
    assert {"os.py", "argparse.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert not any(name.startswith("_sysconfigdata") or name == "sitecustomize.py" for name in names)
    assert open_corpus(standard_library()).size > 1_000_000


def test_files_and_folders_in_order_hidden_ones_left_out(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/.git/config", ".hidden", "c.txt"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(name)
    (tmp_path / "single.txt").write_text("single")
    found = find_files([str(tmp_path / "single.txt"), str(tmp_path / "folder")], {})
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "single.txt",
        "folder/a/z.txt",
        "folder/b.txt",
        "folder/c.txt",
    ]


def test_data_below_fsx_is_found_in_the_folder_that_stands_for_it(tmp_path):
    (tmp_path / "corpus.txt").write_text("text")
    assert find_files(["/fsx/corpus.txt"], {"MICS_SHARED": str(tmp_path)}) == (tmp_path / "corpus.txt",)


def test_missing_data_is_refused_by_name():
    with pytest.raises(RunRefusedError, match=r"train\.data: /no/such/file is not there"):
        find_files(["stdlib", "/no/such/file"], {})


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_reading_across_files_is_reading_their_concatenation(tmp_path_factory, contents, data):
    folder = tmp_path_factory.mktemp("corpus")
    for i, content in enumerate(contents):
        (folder / str(i)).write_bytes(content)
    corpus, text = open_corpus(sorted(folder.iterdir())), b"".join(contents)
    assert corpus.size == len(text)
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        count = data.draw(st.integers(1, 20))
        assert bytes(corpus.read(start, count).tolist()) == text[start : start + count]


def test_the_digest_sees_contents_and_where_files_end(tmp_path):
    def digest(*contents):
        for i, content in enumerate(contents):
            (tmp_path / str(i)).write_text(content)
        return open_corpus([tmp_path / str(i) for i in range(len(contents))]).digest()

    assert digest("one", "two") == digest("one", "two")
    assert len({digest("one", "two"), digest("onet", "wo"), digest("two", "one"), digest("one", "twp")}) == 4


def test_targets_are_the_next_bytes_and_end_with_the_corpus(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100, 111)))  # 11 bytes: windows of 4, 4 and 2 targets
    corpus = open_corpus([tmp_path / "text"])
    assert windows_of(corpus.size, 4) == 3
    inputs, targets = load_batch(corpus, range(3), sequence=4, seed=0)
    rows = sorted(zip(inputs.tolist(), targets.tolist(), strict=True), reverse=True)
    assert rows == [
        ([108, 109, 0, 0], [109, 110, IGNORED, IGNORED]),
        ([104, 105, 106, 107], [105, 106, 107, 108]),
        ([100, 101, 102, 103], [101, 102, 103, 104]),
    ]
    assert inputs.dtype == targets.dtype == torch.int64


def test_a_corpus_that_is_empty_or_too_short_says_found_and_needed():
    with pytest.raises(RunRefusedError, match="found 0 bytes, one step needs 129"):
        check_corpus(0, vocabulary=256, sequence=16, global_batch=8)
    with pytest.raises(RunRefusedError, match="found 128 bytes, one step needs 129"):
        check_corpus(128, vocabulary=256, sequence=16, global_batch=8)
    check_corpus(129, vocabulary=256, sequence=16, global_batch=8)


def test_a_vocabulary_below_256_cannot_read_bytes():
    with pytest.raises(RunRefusedError, match="vocabulary of 255"):
        check_corpus(10**6, vocabulary=255, sequence=16, global_batch=8)
    check_corpus(10**6, vocabulary=50257, sequence=16, global_batch=8)
