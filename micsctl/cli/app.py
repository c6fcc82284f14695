"""The entry point: commands, and how errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from micsctl.cli import signals
from micsctl.errors import ExitCode, Interrupted, MicsctlError, UsageError

if TYPE_CHECKING:
    import typer

_HELP = """Train large models with MiCS on AWS GPU machines, from a laptop.

  micsctl demo      the whole job on this machine, no account needed
  micsctl init      write mics.yaml; then: up, topology, plan, launch, down

Exit codes: 0 done, 1 failure, 2 usage or config, 3 capacity, 4 quota or permission, 5 credentials, 6 partial (something
still costs money), 7 health gate, 8 the remote job failed, 130 Ctrl-C.
"""


def build() -> typer.Typer:
    import typer

    from micsctl.cli import bench, clusters, demo, runs, sandbox, setup
    from micsctl.cli.options import with_options

    app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help=_HELP)(setup.common)
    for command in (
        setup.init,
        setup.version,
        demo.demo,
        runs.plan,
        clusters.up,
        clusters.status,
        clusters.topology,
        runs.launch,
        runs.logs,
        runs.runs,
        runs.stop,
        clusters.ssh,
        clusters.exec_,
        clusters.extend,
        clusters.down,
    ):
        # ssh and exec hand on what follows their first argument, options too
        settings = {"allow_interspersed_args": command not in (clusters.ssh, clusters.exec_)}
        app.command(name=command.__name__.rstrip("_"), context_settings=settings)(with_options(command))
    boxes = typer.Typer(
        help="The emulated EC2 with real hosts on this machine.", no_args_is_help=True, rich_markup_mode=None
    )
    for command in (sandbox.start, sandbox.status, sandbox.stop, sandbox.fault):
        boxes.command(name=command.__name__)(with_options(command))
    app.add_typer(boxes, name="sandbox")
    benches = typer.Typer(
        help="Measure what the strategies send and cost, on a cluster or on this machine.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for command in (bench.strategies, bench.traffic, bench.collectives, bench.scaling):
        benches.command(name=command.__name__)(with_options(command))
    app.add_typer(benches, name="bench")
    return app


def main() -> None:
    """Run the command line; every way out has its documented exit code.

    Hardly anything is imported before, so that Ctrl-C finds this ready for it.
    """
    as_json = "--json" in sys.argv[1:]
    heard = signals.count_as_ctrl_c()
    try:
        error, code = _run(as_json)
    except KeyboardInterrupt:  # once more, while the first was being dealt with
        error, code = Interrupted("stopped by Ctrl-C"), int(ExitCode.INTERRUPTED)
    signals.ignore(heard)  # for as long as it takes to say this
    if error:
        _explain(error, as_json)
    signals.leave_at_once(heard)
    sys.exit(code)


def _run(as_json: bool) -> tuple[MicsctlError | None, int]:
    """What is still to be explained, and the exit code."""
    try:
        _open_standard_streams()
        build()()
        return None, ExitCode.DONE
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code == ExitCode.INTERRUPTED:  # before the command began; Typer makes this of it, without a word
            return Interrupted("stopped by Ctrl-C"), code
        if code == ExitCode.USAGE and as_json:  # Typer has explained it, on stderr only
            return UsageError("wrong command line", next="micsctl --help"), code
        return None, code
    except KeyboardInterrupt:
        return Interrupted("stopped by Ctrl-C"), ExitCode.INTERRUPTED
    except Exception as caught:  # noqa: BLE001  (the last net: a fault of ours is explained as well)
        if {"-v", "--verbose"} & set(sys.argv[1:]):
            traceback.print_exc()
        error = _explained(caught)
        return error, error.exit_code


def _explained(caught: Exception) -> MicsctlError:
    if isinstance(caught, MicsctlError):
        return caught
    return (isinstance(caught, OSError) and _file_error(caught)) or _internal(caught)


def _explain(error: MicsctlError, as_json: bool) -> None:
    from micsctl.cli.render import Render

    Render(json=as_json).error(error)


def _open_standard_streams() -> None:
    """/dev/null in place of a standard stream that is closed: else the next file or socket would take its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _file_error(error: OSError) -> MicsctlError | None:
    """A folder that cannot be used or a full disk; None where neither is to blame."""
    from micsctl.home import Home

    home = Home.find().folder
    if error.filename and Path(os.fsdecode(error.filename)).is_relative_to(home):
        why = f"{error.filename}: {error.strerror}"
        return UsageError(f"cannot use the folder {home}", why, next="set MICSCTL_HOME to a folder of yours")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return MicsctlError("cannot write", f"{error.filename or 'a file'}: {error.strerror}")
    return None


def _internal(error: Exception) -> MicsctlError:
    """A fault of ours, without its traceback."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return MicsctlError(
        f"internal error: {type(error).__name__}: {error}",
        f"at {place.filename}:{place.lineno}; this is a fault of micsctl",
        next="the same command with -v shows the traceback",
    )
