"""The only place that prints. Data on stdout, everything else on stderr; live display only on a terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from micsctl.errors import MicsctlError
from micsctl.report.table import Table, format_seconds

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Render:
    """How this invocation talks to its user."""

    json: bool = False
    verbose: bool = False
    quiet: bool = False

    def result(self, value: Any, *tables: Table, text: str = "") -> None:
        """The command's answer: the value as JSON, or its tables and text."""
        if self.json:
            self.line(json.dumps(plain(value), indent=2))
            return
        for table in tables:
            self.table(table)
        if text:
            self.line(text)

    def table(self, table: Table) -> None:
        if self.json:
            return
        if sys.stdout.isatty():
            _console(sys.stdout).print(_rich_table(table))
        else:
            self.line(_text_table(table))

    def last_line(self, value: Any) -> None:
        """One JSON object on one line, with and without --json."""
        self.line(json.dumps(plain(value)))

    def line(self, text: str) -> None:
        """A line of data, such as a log line. Flushed, so that a closed pipe is noticed here and not at exit."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """For the eye only."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        if self.verbose:
            self.note(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One row per phase with its elapsed time; on a terminal the row lives while the phase runs."""
        started = time.monotonic()
        live = sys.stderr.isatty() and not self.quiet
        if live:
            with _console(sys.stderr).status(f"{name} ..."):
                yield
        else:
            yield
        self.note(f"  {name:<44} {format_seconds(time.monotonic() - started):>10}")

    def confirm(self, question: str) -> bool:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: MicsctlError) -> None:
        """The four parts; as JSON on stdout too where that was asked for."""
        if self.json:
            self.line(json.dumps(error.as_json(), indent=2))
        lines = [f"micsctl: {error.what}"]
        lines += [f"  {line}" for line in error.why.splitlines()]
        lines += error.costs.splitlines()
        lines += [f"next: {error.next}"] if error.next else []
        print("\n".join(lines), file=sys.stderr, flush=True)


class RunView:
    """Shows a run as it goes: rank 0's lines, and on a terminal a bar with the time that is left."""

    def __init__(self, render: Render, steps: int) -> None:
        self._render, self._steps = render, steps
        self._seen, self._seconds = 0, 0.0
        self._live = sys.stderr.isatty() and not render.quiet

    def output(self, line: str) -> None:
        if not self._render.quiet:
            self._clear()
            print(line, file=sys.stderr if self._render.json else sys.stdout, flush=True)

    def metrics(self, line: dict[str, Any]) -> None:
        self._seen, self._seconds = self._seen + 1, self._seconds + line["step_seconds"]
        if self._live:
            step, total = line["step"], self._steps
            left = (total - step) * self._seconds / self._seen
            filled = int(24 * step / total)
            bar = "━" * filled + "╌" * (24 - filled)
            sys.stderr.write(f"\r\x1b[K{bar} step {step}/{total}  left {format_seconds(left)}")
            sys.stderr.flush()

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def plain(value: Any) -> Any:
    """A value as JSON knows it; a number that is not finite is null there."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def _console(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable

    caption = table.caption or None
    drawn = RichTable(
        title=table.title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    for column in table.columns:
        drawn.add_column(column, justify="right" if column in table.numeric else "left")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _text_table(table: Table) -> str:
    """Aligned columns, two blanks between them: stable for pipes and tests."""
    rows: Sequence[tuple[str, ...]] = (table.columns, *table.rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    right = [column in table.numeric for column in table.columns]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]
    title = [table.title] if table.title else []
    return "\n".join([*title, *lines, *([table.caption] if table.caption else []), ""])
