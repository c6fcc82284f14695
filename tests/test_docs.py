"""The documents say what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from micsctl.spec import Spec

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def keys(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, item in value.items() for k, v in keys(item, f"{prefix}.{name}".lstrip(".")).items()}


def test_the_reference_has_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (?:`(.*?)`)? ?\|", (ROOT / "docs/reference.md").read_text(), re.M)
    shown = {"None": "", "True": "true", "False": "false", "['stdlib']": "[stdlib]"}
    expected = {k: str(v) for k, v in keys(Spec().model_dump(mode="json")).items()}
    assert dict(rows) == {k: shown.get(v, v) for k, v in expected.items()}
    assert len(rows) == len(expected)  # none stands there twice


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_is_left_open(document: Path) -> None:
    assert not re.search(r"\b(TODO|TBD|FIXME)\b|<!-- (picture|evidence) -->", document.read_text())
