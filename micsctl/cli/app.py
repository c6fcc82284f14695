"""The entry point: commands, and how errors become exit codes."""

from __future__ import annotations

import sys

import typer

from micsctl.cli import clusters, demo, runs, sandbox, setup
from micsctl.cli.options import with_options
from micsctl.cli.render import Render
from micsctl.errors import ExitCode, Interrupted, MicsctlError

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
        app.command(name=command.__name__.rstrip("_"))(with_options(command))
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
    except MicsctlError as error:
        if verbose:
            import traceback

            traceback.print_exc()
        render.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        render.error(Interrupted("stopped by Ctrl-C"))
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output has left; there is nobody to tell
        sys.stdout = None  # keeps the interpreter from flushing into the closed pipe
        sys.exit(ExitCode.FAILURE)
    except SystemExit as leaving:
        if leaving.code == ExitCode.USAGE and render.json:
            render.error(MicsctlErrorOnUsage())
        raise
    except Exception as error:
        if verbose:
            raise
        where = error.__traceback__
        while where and where.tb_next:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "unknown place"
        render.error(
            MicsctlError(
                f"internal error: {type(error).__name__}: {error}",
                f"at {place}; this is a fault of micsctl",
                next="the same command with -v shows the traceback",
            )
        )
        sys.exit(ExitCode.FAILURE)


class MicsctlErrorOnUsage(MicsctlError):
    """A wrong command line, as JSON; Typer has already explained it on stderr."""

    exit_code = ExitCode.USAGE

    def __init__(self) -> None:
        super().__init__("wrong command line", next="micsctl --help")
