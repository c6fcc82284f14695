"""Files that people already have, whole and broken."""

import json
import struct

import numpy as np
import pytest
from mics.data.corpus import check_tokens, open_corpus
from mics.data.formats import MEGATRON_TYPES, open_file
from mics.errors import RunRefusedError

IDS = [3, 50000, 1, 0, 7, 65535]


def llmc(path, ids, magic=20240520, version=1, kind="<u2", says=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if says is None else says
    path.write_bytes(header.tobytes() + np.array(ids, dtype=kind).tobytes())


def megatron(path, documents, code=4, version=1, magic=b"MMIDIDX\x00\x00"):
    """A document is a list of sequences."""
    kind = np.dtype(MEGATRON_TYPES.get(code, "<f8"))
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(s) for s in sequences], dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes, dtype="<i8")[:-1]]) * kind.itemsize
    ends = np.cumsum([0] + [len(document) for document in documents])
    path.write_bytes(np.array([t for s in sequences for t in s], dtype=kind).tobytes())
    path.with_suffix(".idx").write_bytes(
        magic
        + struct.pack("<QBQQ", version, code, len(sizes), len(ends))
        + sizes.tobytes()
        + pointers.astype("<i8").tobytes()
        + ends.astype("<i8").tobytes()
    )


def nanogpt(path, ids):
    path.write_bytes(np.array(ids, dtype="<u2").tobytes())


def ours(path, ids, dtype="uint32", **index):
    path.write_bytes(np.array(ids, dtype=dtype).tobytes())
    path.with_suffix(".json").write_text(json.dumps({"dtype": dtype, **index}))


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("nanogpt", nanogpt),
        ("llm.c", llmc),
        ("llm.c", lambda path, ids: llmc(path, ids, 20240801, 7, "<u4")),
        ("megatron", lambda path, ids: megatron(path, [[ids[:2], ids[2:3]], [ids[3:]]])),
        ("megatron", lambda path, ids: megatron(path, [[ids]], code=8)),
        ("megatron", lambda path, ids: megatron(path, [[ids]], code=5)),
        ("mics", ours),
        ("mics", lambda path, ids: ours(path, ids, tokens=len(ids), vocabulary=65536)),
    ],
)
def test_token_files_are_recognised_and_read(tmp_path, kind, write):
    path = tmp_path / "tokens.bin"
    write(path, IDS)
    piece = open_file(path)
    assert (piece.kind, piece.tokens.tolist()) == (kind, IDS)
    assert open_corpus([path]).read(1, 3).tolist() == IDS[1:4]


def test_megatrons_documents_are_counted(tmp_path):
    megatron(tmp_path / "a.bin", [[[1, 2], [3]], [[4]], [[5, 6]]])
    assert open_file(tmp_path / "a.bin").documents == 3


def test_a_long_index_is_checked_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("mics.data.formats.SEQUENCES_AT_ONCE", 2)
    megatron(tmp_path / "a.bin", [[[1, 2], [3], [4, 5, 6], [7], [8]]])
    assert open_file(tmp_path / "a.bin").tokens.tolist() == list(range(1, 9))


def test_large_and_small_files_are_mapped_in_their_own_ways_and_read_alike(tmp_path, monkeypatch):
    nanogpt(tmp_path / "a.bin", IDS)
    small = open_file(tmp_path / "a.bin").tokens.tolist()
    monkeypatch.setattr("mics.data.formats.SMALL_BYTES", 0)
    assert open_file(tmp_path / "a.bin").tokens.tolist() == small


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def gap(index):
    """Move the second sequence of a Megatron index one token on."""
    raw = bytearray(index.read_bytes())
    at = 34 + 4 * 2 + 8
    raw[at : at + 8] = struct.pack("<q", struct.unpack("<q", raw[at : at + 8])[0] + 4)
    index.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda p: (nanogpt(p, IDS), cut(p, 1)), r"tokens\.bin is cut short: 11 bytes are no whole number of 2-byte"),
        (lambda p: (llmc(p, IDS), cut(p, 2)), r"tokens\.bin is cut short .* header says 6 tokens, the file holds 5"),
        (lambda p: (llmc(p, IDS), cut(p, 1)), r"tokens\.bin is cut short: 11 bytes"),
        (lambda p: (megatron(p, [[IDS]]), cut(p, 4)), r"tokens\.bin is cut short .* index says 6 tokens, .* holds 5"),
        (lambda p: (megatron(p, [[IDS]]), cut(p.with_suffix(".idx"), 1)), r"tokens\.idx is cut short: 61 of 62 bytes"),
        (lambda p: (megatron(p, [[IDS]]), cut(p.with_suffix(".idx"), 50)), r"tokens\.idx is cut short: 12 bytes"),
        (lambda p: (megatron(p, [[[1, 2], [3]]]), gap(p.with_suffix(".idx"))), r"tokens\.idx: .* one after the other"),
        (lambda p: megatron(p, [[IDS]], magic=b"TNTIDX\x00\x00\x00"), r"tokens\.idx is no index of Megatron's"),
        (lambda p: megatron(p, [[IDS]], version=2), r"tokens\.idx is no index of Megatron's"),
        (lambda p: megatron(p, [[IDS]], code=6), r"tokens\.idx is no index of Megatron's"),
        (lambda p: ours(p, IDS, tokens=7), r"tokens\.bin is cut short .* index says 7 tokens, the file holds 6"),
        (lambda p: (ours(p, IDS), cut(p, 1)), r"tokens\.bin is cut short: 23 bytes are no whole number of 4-byte"),
        (lambda p: (ours(p, IDS), p.with_suffix(".json").write_text("{")), r"tokens\.json is no index"),
        (lambda p: ours(p, IDS, colour=1), r"tokens\.json is no index .*colour"),
        (lambda p: ours(p, IDS, tokens="6"), r"tokens\.json: tokens '6' is not what an index"),
        (lambda p: ours(p, IDS, format="other"), r"tokens\.json: format 'other'"),
        (lambda p: ours(p, IDS, dtype="int64"), r"tokens\.json: dtype 'int64'"),
    ],
)
def test_a_torn_or_strange_file_is_refused_by_name(tmp_path, break_it, says):
    break_it(tmp_path / "tokens.bin")
    with pytest.raises(RunRefusedError, match=says):
        open_file(tmp_path / "tokens.bin")


def test_what_is_neither_text_nor_tokens_is_sent_to_prepare(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(RunRefusedError, match=r"a\.jsonl is neither text nor tokens; run python -m mics\.data prepare"):
        open_file(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda p: ((p / "a.bin").write_bytes(b"abcd"), (p / "b.txt").write_text("text")), "one is text and one holds"),
        (
            lambda p: (ours(p / "a.bin", IDS, tokenizer_sha256="1"), ours(p / "b.bin", IDS, tokenizer_sha256="2")),
            "differ",
        ),
        (lambda p: (ours(p / "a.bin", IDS, part="train"), ours(p / "b.bin", IDS, part="validation")), "training data"),
    ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path, write, why):
    write(tmp_path)
    files = [path for path in sorted(tmp_path.iterdir()) if path.suffix != ".json"]
    with pytest.raises(RunRefusedError, match=rf"{files[0].name} and .*{files[1].name} do not go together: .*{why}"):
        open_corpus(files)


def test_negative_tokens_are_found(tmp_path):
    megatron(tmp_path / "a.bin", [[[1, -1, 2]]])
    with pytest.raises(RunRefusedError, match=r"a\.bin: token 1 is -1"):
        check_tokens(open_corpus([tmp_path / "a.bin"]), vocabulary=100, rank=0, world_size=1)
