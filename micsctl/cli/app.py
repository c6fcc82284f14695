"""The entry point: commands, and how errors become exit codes."""

from __future__ import annotations

import sys
import traceback

import typer

from micsctl.cli import clusters, demo, runs, sandbox, setup
from micsctl.cli.options import with_options
from micsctl.cli.render import Render
from micsctl.errors import ExitCode, Interrupted, MicsctlError, UsageError

_HELP = """Train large models with MiCS on AWS GPU machines, from a laptop.

  micsctl demo      the whole job on this machine, no account needed
  micsctl init      write mics.yaml; then: up, topology, plan, launch, down

Exit codes: 0 done, 1 failure, 2 usage or config, 3 capacity, 4 quota or permission, 5 credentials, 6 partial (something
still costs money), 7 health gate, 8 the remote job failed, 130 Ctrl-C.
"""


def build() -> typer.Typer:
    app = typer.Typer(
        help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
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
    return app


def main() -> None:
    """Run the command line; every way out has its documented exit code."""
    arguments = sys.argv[1:]
    render = Render(json="--json" in arguments)
    verbose = bool({"-v", "--verbose"} & set(arguments))
    try:
        build()()
    except SystemExit as leaving:
        if leaving.code == ExitCode.USAGE and render.json:  # Typer has explained it, on stderr only
            render.error(UsageError("wrong command line", next="micsctl --help"))
        raise
    except KeyboardInterrupt:
        explained: MicsctlError = Interrupted("stopped by Ctrl-C")
    except MicsctlError as error:
        explained = error
        if verbose:
            traceback.print_exc()
    except Exception as error:  # noqa: BLE001  (the last net: a fault of ours is explained as well)
        explained = _internal(error)
        if verbose:
            traceback.print_exc()
    render.error(explained)
    sys.exit(explained.exit_code)


def _internal(error: Exception) -> MicsctlError:
    """A fault of ours, without its traceback."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return MicsctlError(
        f"internal error: {type(error).__name__}: {error}",
        f"at {place.filename}:{place.lineno}; this is a fault of micsctl",
        next="the same command with -v shows the traceback",
    )
