from __future__ import annotations

from pathlib import Path

from micsctl.cluster.journal import Journal, launched_ids, open_launch


def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "new folder" / "journal.jsonl")


def intend(book: Journal, token: str) -> None:
    book.intend("RunInstances", token=token, zone="us-east-1a", ends_at=1_800_000_000, digest="d")


def test_an_intent_is_open_until_its_outcome_is_known(tmp_path: Path) -> None:
    book = journal(tmp_path)
    assert open_launch(book.read()) is None
    book.intend("CreateVpc")
    intend(book, "t1")
    found = open_launch(book.read())
    assert found
    assert (found.token, found.zone, found.ends_at) == ("t1", "us-east-1a", 1_800_000_000)
    book.write("refused", token="t1", code="InsufficientInstanceCapacity")
    assert open_launch(book.read()) is None
    intend(book, "t2")
    assert open_launch(book.read()).token == "t2"  # type: ignore[union-attr]
    book.write("launched", token="t2", instances=["i-1", "i-2"])
    assert open_launch(book.read()) is None
    assert launched_ids(book.read()) == ["i-1", "i-2"]


def test_down_closes_the_book(tmp_path: Path) -> None:
    book = journal(tmp_path)
    intend(book, "t1")
    book.write("down")
    assert book.read() == []
    assert book.path.stat().st_mode & 0o777 == 0o600


def test_a_line_torn_by_a_crash_hides_no_other(tmp_path: Path) -> None:
    book = journal(tmp_path)
    intend(book, "t1")
    with book.path.open("ab") as file:
        file.write(b'{"event": "laun\xff')
    book.write("launched", token="t1", instances=["i-1"])
    assert launched_ids(book.read()) == ["i-1"]
    assert open_launch(book.read()) is None
