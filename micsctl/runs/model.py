"""A run and what is known of it."""

from __future__ import annotations

import re
import secrets
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from mics.config import RunConfig

from micsctl.errors import UsageError

# exit codes of mics.train
CONFIG_EXIT_CODE = 2  # a mistake in the configuration, the model, the data or the checkpoint path
UNSAVED_EXIT_CODE = 73  # checkpoints cannot be written
STALLED_EXIT_CODE = 74  # a rank stood still for longer than train.limits allows
SAVED_EXIT_CODE = 75  # asked to stop (SIGTERM, spot notice), checkpoint written
DIVERGED_EXIT_CODE = 76  # too many steps in a row without a finite gradient
ENDED_EXIT_CODE = 128 + 15  # asked to stop, nothing saved; of the launcher where no rank could answer SIGTERM yet

# how the trainer ended a run that did not go well; the first that any node has is the cause
EXIT_WORDS = {
    STALLED_EXIT_CODE: "a rank stood still",
    DIVERGED_EXIT_CODE: "too many steps without a finite gradient",
    UNSAVED_EXIT_CODE: "checkpoints cannot be written",
    CONFIG_EXIT_CODE: "refused by the trainer",
}

BENCHMARK = "bench"  # in place of a strategy, in the id of a run


class Status(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # asked to end
    LOST = "lost"  # no exit code and no process: the machine or the launcher was killed


@dataclass(frozen=True)
class NodeState:
    """What one node's run folder says."""

    index: int
    alive: bool
    exit_code: int | None


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, as torchrun on its node saw it."""

    rank: int
    local_rank: int
    node: str
    exit_code: int  # negative: ended by that signal
    at_seconds: float
    last_lines: str  # of the rank's stderr; what the trainer says itself, where it ended the run


@dataclass(frozen=True)
class Run:
    """One run as its folders on the nodes describe it."""

    run_id: str
    config: RunConfig
    nodes: tuple[NodeState, ...]
    last_step: int | None
    last_loss: float | None
    skipped_in_row: int = 0  # steps up to the last one that had no finite gradient

    @property
    def of_benchmark(self) -> bool:
        """Whether it compares strategies or collectives, and has none of its own."""
        return f"-{BENCHMARK}-" in self.run_id

    @property
    def saved_when_stopped(self) -> bool:
        """Whether it answered the request to stop with a checkpoint."""
        return self.status is Status.STOPPED and any(node.exit_code == SAVED_EXIT_CODE for node in self.nodes)

    @property
    def why(self) -> str:
        """How it ended, in words; "" where there is nothing to say."""
        status, codes = self.status, [node.exit_code for node in self.nodes if node.exit_code]
        if status is Status.STOPPED:
            return "with a checkpoint" if self.saved_when_stopped else "without a checkpoint"
        if status is Status.LOST:
            return "the machines or the launchers were killed"
        said = next((words for code, words in EXIT_WORDS.items() if code in codes), "")
        if said or not codes:
            return said
        return f"killed by {signal_name(codes[0] - 128)}" if codes[0] > 128 else f"exit code {codes[0]}"

    @property
    def status(self) -> Status:
        if any(node.exit_code for node in self.nodes):
            stopped = all(node.exit_code in (0, SAVED_EXIT_CODE, ENDED_EXIT_CODE) for node in self.nodes)
            return Status.STOPPED if stopped else Status.FAILED
        if all(node.exit_code == 0 for node in self.nodes):
            return Status.DONE
        return Status.RUNNING if any(node.alive for node in self.nodes) else Status.LOST


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def new_run_id(what: str, now: datetime | None = None) -> str:
    """Sorts by time within a year and says what ran, a strategy or `BENCHMARK`: `1129-201530-mics-3f2a`."""
    moment = now or datetime.now(UTC)
    return f"{moment:%m%d-%H%M%S}-{what}-{secrets.token_hex(2)}"


def checked_run_id(text: str) -> str:
    """A run id from the command line. It becomes part of remote commands, so only its own form is let through."""
    if not re.fullmatch(r"[0-9]{4}-[0-9]{6}-[a-z0-9-]+", text):
        raise UsageError(f"{text!r} is no run id", "it looks like 1129-201530-mics-3f2a", next="micsctl runs")
    return text
