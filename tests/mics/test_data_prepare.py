"""Text to token files."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from mics.data.corpus import open_corpus
from mics.data.index import read_index
from mics.data.prepare import Recipe, prepare
from mics.data.progress import duration, progress_line
from mics.data.tokenizer import Vocabulary, vocabulary_of
from mics.errors import RunRefusedError

BYTES = Recipe("bytes", "text", Vocabulary("bytes", None, 256, 0), 0.0)


def make(paths, to, recipe=BYTES, workers=1, progress=lambda done, total: None):
    return prepare(tuple(paths), to, recipe, workers=workers, progress=progress)


def command(*words, **options):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mics.data", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def run(*words):
    process = command(*words)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def lines(tmp_path):
    """lines(documents, name): a .jsonl file, packed if its name says so."""

    def write(documents, name="a.jsonl"):
        text = "".join(json.dumps({"text": document, "id": i}) + "\n" for i, document in enumerate(documents))
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer.json whose words are w0, w1, ... and an end-of-document token."""
    tokenizers = pytest.importorskip("tokenizers")

    def write(words, end="</s>"):
        ids = {f"w{i}": i for i in range(words)} | {end: words}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.enable_truncation(3)  # as many files on the hub say; a corpus must not be cut
        made.enable_padding()
        made.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    return write


def test_every_kind_of_input_becomes_documents_in_order(tmp_path, lines):
    (tmp_path / "b.txt").write_text("zwei\nZeilen ü\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed text", mtime=0))
    (tmp_path / "empty.txt").write_text("")
    paths = [
        lines(["one", "", "two\n"]),
        tmp_path / "b.txt",
        tmp_path / "empty.txt",
        tmp_path / "c.txt.gz",
        lines(["p"], "d.jsonl.gz"),
    ]
    tally = make(paths, tmp_path / "out")["train"]
    expected = "one\0two\n\0zwei\nZeilen ü\n\0packed text\0p\0".encode()
    assert (tmp_path / "out/train.bin").read_bytes() == expected
    assert (tally.tokens, tally.documents) == (len(expected), 5)
    index = read_index(tmp_path / "out/train.json")
    assert (index.tokens, index.documents, index.vocabulary, index.end) == (len(expected), 5, 256, 0)
    assert (index.largest, index.largest_at) == (max(expected), expected.index(max(expected)))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]


def test_the_result_depends_on_neither_the_workers_nor_where_the_input_is_cut(tmp_path, lines, monkeypatch):
    documents = [f"document {i} " + "x" * (i * 37 % 300) for i in range(200)]
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(3000)))
    paths = [lines(documents), tmp_path / "long.txt"]
    made = set()
    for unit_bytes, workers in ((4 << 20, 1), (1000, 1), (1000, 3), (777, 2)):
        monkeypatch.setattr("mics.data.units.UNIT_BYTES", unit_bytes)
        make(paths, tmp_path / f"{unit_bytes}-{workers}", replace(BYTES, validation=0.2), workers)
        folder = tmp_path / f"{unit_bytes}-{workers}"
        made.add(tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir())))
    assert len(made) == 1
    stored = dict(made.pop())
    documents.append((tmp_path / "long.txt").read_text())
    assert sorted((stored["train.bin"] + stored["validation.bin"]).decode().split("\0")) == ["", *sorted(documents)]


def test_documents_are_held_out_by_what_they_are(tmp_path, lines):
    documents = [f"document {i}" for i in range(300)]
    recipe = replace(BYTES, validation=0.25)

    def parts(name, given):
        make([lines(given, f"{name}.jsonl")], tmp_path / name, recipe)
        return [
            set((tmp_path / name / f"{part}.bin").read_bytes().split(b"\0")) - {b""} for part in ("train", "validation")
        ]

    train, validation = parts("some", documents)
    assert train | validation == {text.encode() for text in documents}
    assert not train & validation
    assert 50 < len(validation) < 100
    longer, more = parts("more", ["new", *documents, *documents])
    assert train <= longer
    assert validation <= more
    assert not longer & more
    with pytest.raises(RunRefusedError, match="one is training data and one is not"):
        open_corpus([tmp_path / "some/train.bin", tmp_path / "some/validation.bin"])


@pytest.mark.parametrize(("words", "dtype"), [(10, "uint8"), (300, "uint16"), (70000, "uint32")])
def test_a_tokenizer_gives_the_narrowest_tokens_that_hold_its_ids(tmp_path, lines, tokenizer, words, dtype):
    path = tokenizer(words)
    ids = [1, 2, 3, 4, 5, words - 1]
    recipe = Recipe(path, "text", vocabulary_of(path, None), 0.0)
    make([lines([" ".join(f"w{i}" for i in ids), "w7"])], tmp_path / "out", recipe)
    corpus = open_corpus([tmp_path / "out/train.bin"])
    assert corpus.read(0, 99).tolist() == [*ids, words, 7, words]
    index = corpus.pieces[0].index
    assert (index.dtype, index.vocabulary, index.end, index.tokenizer) == (dtype, words + 1, words, "tokenizer.json")
    assert len(index.tokenizer_sha256) == 64


def test_the_end_of_a_document_can_be_named_and_must_be_known(tokenizer):
    path = tokenizer(5, end="STOP")
    with pytest.raises(RunRefusedError, match=r"none of <\|endoftext\|>.*name one of its tokens with --end"):
        vocabulary_of(path, None)
    with pytest.raises(RunRefusedError, match="no token 'HALT'"):
        vocabulary_of(path, "HALT")
    assert vocabulary_of(path, "STOP").end == 5


def test_without_the_tokenizers_package_an_error_says_what_to_install(tokenizer, monkeypatch):
    path = tokenizer(6)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    from mics.data.tokenizer import load_tokenizer

    load_tokenizer.cache_clear()
    with pytest.raises(RunRefusedError, match=r"pip install 'micsctl\[tokenizers\]'"):
        vocabulary_of(path, None)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n' * 300 + b"{oops\n", r"a\.jsonl:301: not JSON: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n\n{oops\n', mtime=0), r"a\.jsonl\.gz:3: not JSON: "),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"a\.jsonl:1: no field 'text'; it has 'body', 'id' \(choose one with"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: not an object with a text 'text'"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: not an object with a text 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.txt", b"good\nb\xffd\n", r"a\.txt is no UTF-8 text: invalid start byte in b'good\\nb\\xffd"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"a\.txt\.gz is cut short"),
        ("a.txt.gz", b"not packed", r"a\.txt\.gz: Not a gzipped file"),
        ("a.txt", b"", "found no text in 1 files"),
    ],
)
def test_bad_input_is_one_line_that_names_the_place_and_nothing_is_left(tmp_path, monkeypatch, name, content, says):
    monkeypatch.setattr("mics.data.units.UNIT_BYTES", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunRefusedError, match=says) as error:
        make([tmp_path / name], tmp_path / "out", workers=2)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert multiprocessing.active_children() == []


def test_too_few_documents_to_hold_one_out(tmp_path, lines):
    with pytest.raises(RunRefusedError, match=r"no document of 1 fell to validation; .* use train\.validation\.share"):
        make([lines(["one"])], tmp_path / "out", replace(BYTES, validation=1e-9))


def test_a_folder_that_is_there_is_never_touched(tmp_path, lines):
    path = lines(["one"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(RunRefusedError, match="out is there already"):
        make([path], tmp_path / "out")
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(RunRefusedError, match=r"other\.partial is there: another prepare"):
        make([path], tmp_path / "other")
    assert (tmp_path / "other.partial").is_dir()


def test_a_killed_worker_is_said_and_nothing_is_left(tmp_path, lines, monkeypatch):
    monkeypatch.setattr("mics.data.units.UNIT_BYTES", 100)
    path = lines(["x" * 90] * 200)

    def kill(done, total):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(RunRefusedError, match="a worker was killed"):
        make([path], tmp_path / "out", workers=2, progress=kill)
    assert [child.name for child in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing(tmp_path, number):
    with gzip.open(tmp_path / "big.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"the same line again and again\n" * 35000)
    process = command("prepare", "--from", tmp_path / "big.txt.gz", "--to", tmp_path / "out", "--workers", "2")
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out.partial/0.train")) and time.monotonic() < deadline:
        time.sleep(0.01)
    started = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "mics: stopped"
    assert "Traceback" not in err
    assert time.monotonic() - started < 10
    assert [path.name for path in tmp_path.iterdir()] == ["big.txt.gz"]


def test_the_commands_end_to_end(tmp_path, lines):
    source = lines([f"text {i}" for i in range(50)])
    code, out, err = run("prepare", "--from", source, "--to", tmp_path / "out", "--validation", "0.2", "--workers", "1")
    assert code == 0
    assert f"{tmp_path}/out/train.bin: " in out
    assert "100%" in err
    assert "\r" not in err
    code, out, err = run("show", tmp_path / "out", "--check")
    assert (code, err) == (0, "")
    assert "train.bin: mics, " in out
    assert "vocabulary 256" in out
    assert out.count("sha256 as in its index") == 2
    stored = bytearray((tmp_path / "out/train.bin").read_bytes())
    stored[5] ^= 1
    (tmp_path / "out/train.bin").write_bytes(stored)
    code, _, err = run("show", tmp_path / "out/train.bin", "--check")
    assert code == 2
    assert err.startswith(f"mics: {tmp_path}/out/train.bin is damaged: sha256")
    assert run("prepare", "--from", tmp_path / "no", "--to", tmp_path / "x")[2].startswith("mics: --from: ")


def test_preparing_loads_no_torch():
    code = "import sys, mics.data.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_progress_in_words():
    assert progress_line(1_200_000_000, 10_000_000_000, 30) == "1.2 of 10.0 GB, 12%, 40.0 MB/s, 4 min left"
    assert progress_line(0, 500, 0) == "0.0 of 500.0 B, 0%, 0.0 MB/s"
    assert progress_line(0, 0, 1) == "0.0 of 0.0 B, 100%, 0.0 MB/s"
    assert [duration(s) for s in (5, 600, 36000)] == ["5 s", "10 min", "10.0 h"]
