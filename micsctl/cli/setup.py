"""init and version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from micsctl import __version__
from micsctl.cli.options import Options
from micsctl.cli.render import Render
from micsctl.errors import UsageError


def init(options: Options) -> None:
    """Write mics.yaml with every default into this folder."""
    from micsctl import spec

    target = options.config or Path(spec.FILE_NAME)
    text = spec.dump(spec.override(spec.Spec(), name=options.name, region=options.region))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target} is there already", "it was left as it is", next=f"edit {target}") from None
    except OSError as error:
        raise UsageError(f"cannot write {target}", error.strerror or str(error)) from None
    Render(json=options.json).result({"file": str(target)}, text=f"wrote {target}\nnext: micsctl up")


def _show_version(asked: bool) -> None:
    if asked:
        Render().line(f"micsctl {__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """What `micsctl` takes before the name of a command."""


def version(options: Options) -> None:
    """Show the version."""
    Render(json=options.json).result({"version": __version__}, text=f"micsctl {__version__}")
