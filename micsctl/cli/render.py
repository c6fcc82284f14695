"""The only place that prints. Data on stdout, everything else on stderr; live display only on a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from statistics import median
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
    _notes: list[str] = field(
        default_factory=list, init=False, repr=False, compare=False
    )  # of each open phase, the last

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
            _print_rich(_console(sys.stdout), table)
        else:
            self.line(_text_table(table))

    def last_line(self, value: Any) -> None:
        """One JSON object on one line, with and without --json."""
        self.line(json.dumps(plain(value)))

    def line(self, text: str) -> None:
        """A line of data, such as a log line. Flushed, so that a closed pipe is noticed here and not at exit.

        Raises BrokenPipeError where the reader has gone, MicsctlError where the disk is full or the terminal is gone.
        """
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is in the buffer must not fail again at exit
            raise MicsctlError("cannot write to standard output", error.strerror or str(error)) from None

    def note(self, text: str) -> None:
        """For the eye only. Inside a phase it says what is waited for: indented, and once while it stays the same."""
        if self._notes:
            if text == self._notes[-1]:
                return
            self._notes[-1] = text
            text = f"    {text}"
        if not self.quiet:
            _say(f"{text}\n")

    def warning(self, text: str) -> None:
        """On stderr, with --quiet too."""
        _say(f"micsctl: {text}\n")

    def detail(self, text: str) -> None:
        if self.verbose:
            self.note(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One row per phase with its elapsed time; on a terminal the row lives while the phase runs."""
        started, word = time.monotonic(), "failed"
        live = sys.stderr.isatty() and not self.quiet
        self._notes.append("")
        try:
            with _console(sys.stderr).status(f"{name} ...") if live else nullcontext():
                yield
            word = format_seconds(time.monotonic() - started)
        finally:
            self._notes.pop()
            self.note(f"  {name:<44} {word:>10}")

    def confirm(self, question: str) -> bool:
        _say(f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: MicsctlError) -> None:
        """The four parts; as JSON on stdout too where that was asked for."""
        if self.json:
            with suppress(OSError, MicsctlError):  # it may be that very output which cannot be written
                self.line(json.dumps(error.as_json(), indent=2))
        lines = [f"micsctl: {error.what}"]
        lines += [f"  {line}" for line in error.why.splitlines()]
        lines += error.costs.splitlines()
        lines += [f"next: {error.next}"] if error.next else []
        _say("\n".join(lines) + "\n")


class RunView:
    """Shows a run as it goes: rank 0's lines, and on a terminal a bar with the time that is left."""

    def __init__(self, render: Render, steps: int) -> None:
        self._render, self._steps = render, steps
        self._seconds: list[float] = []
        self._skipped, self._validation = 0, ""
        self._bar = ""
        self._live = sys.stderr.isatty() and not render.quiet

    def output(self, line: str) -> None:
        if not self._render.quiet:
            self._clear()
            (self._render.note if self._render.json else self._render.line)(line)
            if self._bar:
                _say(self._bar)

    def metrics(self, line: dict[str, Any]) -> None:
        if "step_seconds" not in line:  # of a benchmark that makes no steps
            return
        self._seconds.append(line["step_seconds"])
        self._skipped += line.get("skipped", False)
        if line.get("validation_loss") is not None:
            self._validation = f"  validation loss {line['validation_loss']:.4f}"
        if self._live:
            step, total = line["step"], self._steps
            seconds = (total - step) * median(self._seconds)  # as the trainer reckons it
            left = f"{seconds:.0f} s" if seconds < 60 else format_seconds(seconds)
            skipped = f"  {self._skipped} skipped" if self._skipped else ""
            self._draw(step, (f"{left} left" if step < total else "ending") + self._validation + skipped)

    def open(self) -> None:
        """The bar before the first step, which is seconds to minutes away."""
        if self._live:
            self._draw(0, "waiting for the first step")

    def close(self) -> None:
        self._bar = ""
        self._clear()

    def _draw(self, step: int, text: str) -> None:
        filled = int(24 * step / self._steps)
        bar = "━" * filled + "╌" * (24 - filled)
        self._bar = f"\r\x1b[K{bar} step {step}/{self._steps}  {text}"
        _say(self._bar)

    def _clear(self) -> None:
        if self._live:
            _say("\r\x1b[K")


class BenchView(RunView):
    """Shows a benchmark as it goes: each measurement on a line, on a terminal a bar with the time that is left.

    words  a measurement in words
    """

    def __init__(self, render: Render, measurements: int, words: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(render, measurements)
        self._words, self._done, self._first_at = words, 0, 0.0

    def output(self, line: str) -> None:
        """Rank 0 says what the measurements say as well."""
        if self._render.verbose:
            self._clear()
            self._render.note(f"  {line}")

    def metrics(self, line: dict[str, Any]) -> None:
        self._done += 1
        now = time.monotonic()
        self._first_at = self._first_at or now
        if not self._live:
            self._render.note(f"  {self._done}/{self._steps}  {self._words(line)}")
            return
        seconds = (self._steps - self._done) * (now - self._first_at) / max(1, self._done - 1)
        left = f"{format_seconds(seconds)} left  " if 1 < self._done < self._steps else ""
        self._draw(self._done, left + self._words(line))


def _say(text: str) -> None:
    """To standard error. A terminal that is gone must not stop the work, and above all not the cleaning up."""
    with suppress(OSError):
        sys.stderr.write(text)
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


def _print_rich(console: Console, table: Table) -> None:
    """Title and caption have lines of their own: inside the table they would be wrapped to its width."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, show_header=_has_header(table), show_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        drawn.add_column(Text(column), justify="right" if column in table.numeric else "left")
    for row in table.rows:
        drawn.add_row(*map(Text, row))  # as text: a [bracket] is no markup
    if table.title:
        console.print(Text(table.title, style="bold"))
    console.print(drawn)
    if table.caption:
        console.print(Text(table.caption, style="dim"))
    console.print()


def _has_header(table: Table) -> bool:
    return any(column.strip() for column in table.columns)


def _text_table(table: Table) -> str:
    """Aligned columns, two blanks between them: stable for pipes and tests."""
    rows: Sequence[tuple[str, ...]] = (table.columns, *table.rows) if _has_header(table) else table.rows
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    right = [column in table.numeric for column in table.columns]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]
    title = [table.title] if table.title else []
    return "\n".join([*title, *lines, *([table.caption] if table.caption else []), ""])
