"""Files end to end, what a run asks of them, and the part that is held out."""

import errno
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.data import corpus as corpus_module
from mics.data.corpus import check_corpus, check_tokens, open_corpus, split
from mics.data.files import find_files, standard_library
from mics.data.order import windows_of
from mics.errors import RunRefusedError


@pytest.fixture
def tokens(tmp_path):
    """tokens(ids, name, **index): a corpus of one uint16 file, with an index if anything is said of it."""

    def make(ids, name="tokens.bin", **index):
        path = tmp_path / name
        path.write_bytes(np.array(ids, dtype="<u2").tobytes())
        if index:
            path.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", **index}))
        return open_corpus([path])

    return make


def test_the_standard_library_is_real_text_and_only_pythons_own():
    names = [path.name for path in standard_library()]
    assert {"os.py", "argparse.py", "typing.py"} <= set(names)
    assert names == sorted(names)
    assert not any(name.startswith("_sysconfigdata") or name == "sitecustomize.py" for name in names)
    assert open_corpus(standard_library()).size > 1_000_000


def test_files_and_folders_in_order_hidden_ones_and_indexes_left_out(tmp_path):
    for name in (
        "b.txt",
        "a/z.txt",
        "a/.git/config",
        ".hidden",
        "c.txt",
        "d.bin",
        "d.json",
        "e.bin",
        "e.idx",
        "f.json",
    ):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(name)
    (tmp_path / "single.txt").write_text("single")
    found = find_files([str(tmp_path / "single.txt"), str(tmp_path / "folder")], {})
    names = ["single.txt", *(f"folder/{name}" for name in ("a/z.txt", "b.txt", "c.txt", "d.bin", "e.bin", "f.json"))]
    assert [str(path.relative_to(tmp_path)) for path in found] == names


def test_data_below_fsx_is_found_in_the_folder_that_stands_for_it(tmp_path):
    (tmp_path / "corpus.txt").write_text("text")
    assert find_files(["/fsx/corpus.txt"], {"MICS_SHARED": str(tmp_path)}) == (tmp_path / "corpus.txt",)


def test_what_may_not_be_read_is_refused_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "shut").mkdir()
    (tmp_path / "open.txt").write_text("text")

    real = os.scandir

    def scandir(path):  # root may read everything
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RunRefusedError, match=r"train\.data: .*shut cannot be read: Permission denied"):
        find_files([str(tmp_path)], {})
    with pytest.raises(RunRefusedError, match="cannot be read: File name too long"):
        find_files(["/" + "x" * 5000], {})


def test_missing_data_is_refused_by_name():
    with pytest.raises(RunRefusedError, match=r"train\.data: /no/such/file is not there"):
        find_files(["stdlib", "/no/such/file"], {})


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_reading_across_files_and_in_parts_is_reading_their_concatenation(tmp_path_factory, contents, data):
    folder = tmp_path_factory.mktemp("corpus")
    for i, content in enumerate(contents):
        (folder / str(i)).write_bytes(content)
    corpus, text = open_corpus(sorted(folder.iterdir())), b"".join(contents)
    assert corpus.size == len(text)
    if text:
        first, start = data.draw(st.integers(0, len(text) - 1)), data.draw(st.integers(0, len(text) - 1))
        stop, count = data.draw(st.integers(first, len(text))), data.draw(st.integers(1, 20))
        assert bytes(corpus.read(start, count).tolist()) == text[start : start + count]
        part = corpus.part(first, stop)
        assert bytes(part.read(0, len(text)).tolist()) == text[first:stop]
        if part.size:  # a place in a part is named as in the file
            assert part.where(0) == corpus.where(first)


def test_the_digest_sees_contents_and_where_files_end(tmp_path):
    def digest(*contents):
        for i, content in enumerate(contents):
            (tmp_path / str(i)).write_text(content)
        return open_corpus([tmp_path / str(i) for i in range(len(contents))]).digest()

    assert digest("one", "two") == digest("one", "two")
    assert len({digest("one", "two"), digest("onet", "wo"), digest("two", "one"), digest("one", "twp")}) == 4


def test_the_digest_of_a_large_file_reads_blocks_of_it(tmp_path, monkeypatch):
    """Both ends and places between are seen, what lies between the blocks is not: that is the bargain."""
    monkeypatch.setattr(corpus_module, "BLOCK_BYTES", 4)
    monkeypatch.setattr(corpus_module, "BLOCKS", 4)
    text = bytearray(100)
    path = tmp_path / "text"
    path.write_bytes(text)
    digest = open_corpus([path]).digest()
    seen = []
    for place in range(100):
        path.write_bytes(text[:place] + b"x" + text[place + 1 :])
        if open_corpus([path]).digest() != digest:
            seen.append(place)
    assert seen == [*range(4), *range(32, 36), *range(64, 68), *range(96, 100)]


def test_a_corpus_that_is_empty_or_too_short_says_found_and_needed(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 128)
    limits = {"vocabulary": 256, "sequence": 16, "global_batch": 8}
    with pytest.raises(RunRefusedError, match="found 0 bytes, one step needs 129"):
        check_corpus(open_corpus([]), **limits)
    with pytest.raises(RunRefusedError, match=r"train\.data: .* found 128 bytes, one step needs 129"):
        check_corpus(open_corpus([tmp_path / "text"]), **limits)
    with pytest.raises(RunRefusedError, match=r"validation\.data: .* found 128 bytes"):
        check_corpus(open_corpus([tmp_path / "text"]), **limits, key="train.validation.data")
    (tmp_path / "text").write_bytes(b"x" * 129)
    check_corpus(open_corpus([tmp_path / "text"]), **limits)


def test_a_vocabulary_below_256_cannot_read_bytes(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 1000)
    corpus = open_corpus([tmp_path / "text"])
    with pytest.raises(RunRefusedError, match="vocabulary of 255"):
        check_corpus(corpus, vocabulary=255, sequence=16, global_batch=8)
    check_corpus(corpus, vocabulary=50257, sequence=16, global_batch=8)


def test_an_index_tells_at_once_that_a_token_is_too_large(tokens):
    corpus = tokens([5] * 99 + [300], largest=300, largest_at=99)
    with pytest.raises(RunRefusedError, match=r"tokens\.bin: token 99 is 300, the model's vocabulary is 300"):
        check_corpus(corpus, vocabulary=300, sequence=4, global_batch=2)
    check_corpus(corpus, vocabulary=301, sequence=4, global_batch=2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_share_the_look_at_tokens_without_an_index(tokens, monkeypatch, world_size):
    monkeypatch.setattr(corpus_module, "CHECKED_TOKENS", 10)
    for place in (0, 57, 123):
        corpus = tokens([7] * place + [300] + [7] * (123 - place))
        complaints = []
        for rank in range(world_size):
            try:
                check_tokens(corpus, vocabulary=300, rank=rank, world_size=world_size)
            except RunRefusedError as error:
                complaints.append(str(error))
        assert [text.split(": ", 1)[1] for text in complaints] == [
            f"token {place} is 300, the model's vocabulary is 300"
        ]
        check_tokens(corpus, vocabulary=301, rank=0, world_size=1)


def test_the_look_is_bounded_and_spread(tokens, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHECKED_TOKENS", 10)
    monkeypatch.setattr(corpus_module, "CHECKED_BLOCKS", 2)
    corpus, read = tokens([7] * 1000), []
    monkeypatch.setattr(corpus_module.Corpus, "read", lambda self, start, count: read.append(start) or np.zeros(1, int))
    for rank in range(2):
        check_tokens(corpus, vocabulary=300, rank=rank, world_size=2)
    assert sorted(read) == [0, 250, 500, 750]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(2, 400), sequence=st.integers(1, 30), share=st.floats(0.01, 0.99))
def test_what_is_held_out_is_never_trained_on_and_nothing_else_is_lost(tokens_of, size, sequence, share):
    corpus = tokens_of(size)
    windows = windows_of(size, sequence)
    if max(1, round(share * windows)) >= windows:
        with pytest.raises(RunRefusedError, match=f"found {windows} sequences of {sequence} tokens"):
            split(corpus, share, sequence)
        return
    train, validation = split(corpus, share, sequence)
    targets = [part.read(1, size).tolist() for part in (train, validation)]
    assert targets[0] + targets[1] == list(range(1, size))
    assert windows_of(train.size, sequence) + windows_of(validation.size, sequence) == windows
    assert windows_of(validation.size, sequence) == max(1, round(share * windows))


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory):
    """tokens_of(size): a corpus that counts 0, 1, 2, ..., in two files."""
    folder = tmp_path_factory.mktemp("counting")

    def make(size):
        ids = np.arange(size, dtype="<u2")
        (folder / "a.bin").write_bytes(ids[: size // 3].tobytes())
        (folder / "b.bin").write_bytes(ids[size // 3 :].tobytes())
        return open_corpus([folder / "a.bin", folder / "b.bin"])

    return make
