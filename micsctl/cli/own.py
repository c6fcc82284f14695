"""A sandbox of one command's own: in a home of its own, so that it meets no other, and gone when the command ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from micsctl.cli import signals
from micsctl.cli.session import Session
from micsctl.errors import Interrupted, MicsctlError, PartialError, UsageError

if TYPE_CHECKING:
    from micsctl.spec import Spec


@dataclass(frozen=True)
class OwnSession(Session):
    """A session that no mics.yaml decides about. `home` must be one that no other command uses."""

    wished: Spec
    ends_with_command: ClassVar[bool] = True

    @cached_property
    def spec(self) -> Spec:
        return self.wished


@contextmanager
def everything_ends(session: OwnSession, what: str) -> Iterator[None]:
    """Whatever happens inside, the sandbox and all that ran in it are gone afterwards.

    what  "the demo": whose end errors speak of
    """
    from micsctl.sandbox import control

    gone = f"nothing is left of {what}; nothing costs money"
    stopped = Interrupted(f"{what} was stopped by Ctrl-C", costs=gone)
    well = False
    try:
        yield
        well = True
    except (KeyboardInterrupt, Interrupted):
        raise stopped from None
    except PartialError as error:  # what it lists goes below
        raise MicsctlError(error.what, error.why, costs=gone) from error
    except UsageError as error:
        error.next = "" if error.next.startswith("micsctl logs") else error.next  # the nodes are gone
        raise
    except MicsctlError as error:
        error.costs, error.next = gone, ""
        raise
    finally:
        with signals.held_back() as came:  # Ctrl-C must not stop the cleaning
            with session.render.phase("sandbox stop"):
                control.stop(session.home)
            shutil.rmtree(session.home.folder, ignore_errors=True)
        if well and came:
            raise stopped


def leftovers(session: OwnSession) -> int:
    """How much of the sandbox is left on this machine; each is named."""
    from micsctl.sandbox import control

    left = control.leftovers(session.home)
    for kind, names in asdict(left).items():
        for name in names:
            session.render.note(f"  left behind: {kind}: {name}")
    return left.total


def require_extras(needed: Mapping[str, str], what: str, hint: str) -> None:
    """Before minutes are spent. Raises UsageError that names all that is missing, not one after the other.

    needed  the extra of micsctl that brings a module, by the module's name
    hint    what to type instead
    """
    missing = [f"{module} (extra {extra})" for module, extra in needed.items() if not find_spec(module)]
    if missing:
        raise UsageError(
            f"{what} needs more than the base install",
            f"missing: {', '.join(missing)}",
            next=f"{hint}   or   pip install '.[{','.join(needed.values())}]'   in a checkout of micsctl",
        )


def writable(folder: Path, command: str) -> None:
    """Try whether a file can be made there, before minutes are spent. What was not there is not there after."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
        for path in new:
            path.rmdir()
    except OSError as error:
        raise UsageError(
            f"cannot write into {folder}", error.strerror or str(error), next=f"{command} --output FOLDER"
        ) from None
