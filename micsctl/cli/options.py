"""The options that every command has, added to its signature in one place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from micsctl.errors import Interrupted, MicsctlError


@dataclass(frozen=True)
class Options:
    """Values of the common options."""

    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            envvar="MICSCTL_CONFIG",
            help="The YAML file; default: mics.yaml here or in a folder above.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", envvar="MICSCTL_NAME", help="Name of the cluster, in place of the file's."),
    ] = None
    region: Annotated[str | None, typer.Option(envvar="MICSCTL_REGION", help="AWS region, in place of the file's.")] = (
        None
    )
    profile: Annotated[str | None, typer.Option(envvar=["MICSCTL_PROFILE", "AWS_PROFILE"], help="AWS profile.")] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", envvar="MICSCTL_YES", help="Do not ask.")] = False
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask; fail where an answer is needed.")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more; tracebacks of internal errors.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")] = False


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A Typer command from a function whose first parameter takes the `Options`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    hints = inspect.get_annotations(Options, eval_str=True)
    common = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Options)
    ]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options = Options(**{p.name: values.pop(p.name) for p in common})
        try:
            command(options, **values)
        except KeyboardInterrupt:  # here, since Typer would make exit code 1 of it
            next = with_flags("micsctl status   (what exists, and what costs money)", options)
            raise Interrupted("stopped by Ctrl-C", next=next) from None
        except MicsctlError as error:
            error.next = with_flags(error.next, options)
            raise

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + common
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    return wrapper


def with_flags(hint: str, options: Options) -> str:
    """The commands of a hint with the flags that this command was given, so that they mean the same cluster. Pure."""
    flags = f" -c {options.config}" if options.config else ""
    if options.name and " -n " not in hint:
        flags += f" -n {options.name}"
    return re.sub(r"\bmicsctl ((?!init|demo|sandbox)(?:bench )?[a-z]+)", rf"micsctl \1{flags}", hint)
