"""Finds the templates and the trainer, in an installed wheel or in a checkout. Nothing else looks for them."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates() -> Path:
    """Folder of the templates: `micsctl/templates` in a wheel, `templates/` in a checkout."""
    packaged = _PACKAGE / "templates"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "templates"


def trainer() -> Path:
    """Folder of the import package `mics`, which is shipped to the nodes."""
    import mics

    return Path(mics.__file__).resolve().parent
