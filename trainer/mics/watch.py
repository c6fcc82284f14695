"""Where every rank is, and the end of a run in which one of them stands still.

Each rank tells where it is, a few times per limit, to the store that all ranks reach and to `beats/rank-<r>.json` in
the run's folder on its node. A rank that stays in one place beyond the limit ends the run: every rank writes its Python
stacks to `stall/rank-<r>.txt`, asks NCCL for its flight record, and ends with exit code 74. One of them compares the
places of all and writes one line that names the rank the others wait for, to stderr and, on every node, to
`stall/line.txt`.

All of it runs on threads of its own, so it works while the main thread waits inside gloo or NCCL; and the two threads
do not wait for each other, so it works while the store does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public; torch does not mark it so

from mics.config import LimitsConfig
from mics.errors import RunFolderError
from mics.ranks import Place

T = TypeVar("T")
STALLED = 74  # the exit code
LEFT = "left"  # the phase of a rank that has ended
BEATS_PER_LIMIT = 10
LONGEST_BEAT_SECONDS = 5.0
QUIET_BEATS = 4  # without a new one in this time a rank is silent
QUIET_SECONDS = 2.0  # and at least: a busy machine may hold a thread back
ANSWER_SECONDS = 10.0  # beyond the quiet time, for the store's and the judge's answer
RECORD_SECONDS = 15.0  # for NCCL to write its flight record; it looks once a second


@dataclass(frozen=True)
class Beat:
    """Where a rank is.

    alive_seconds  by the rank's own clock; it stands still where the rank's threads do
    moves          changes of place so far. All ranks run the same program, so fewer moves means behind
    passes         collectives of the engine so far: the same inside a place
    stage          the collective that the rank is in, or ""
    """

    rank: int
    alive_seconds: float
    step: int
    phase: str
    moves: int
    passes: int
    stage: str


def verdict(before: Mapping[int, Beat], after: Mapping[int, Beat], names: Sequence[str], *, seconds: float) -> str:
    """One line on who holds the run up, from two looks at the beats that lie more than a few beats apart. Pure.

    names    of the nodes, by rank; the ranks of both looks are some of these
    seconds  how long the rank that complained has been in one place

    Silent ranks and ranks that have ended come first: the others can only wait for them. Then the ranks that came least
    far, and of these the ones outside of the collective that the others are in.
    """
    silent = [r for r in after if after[r].phase != LEFT and r in before and before[r] == after[r]]
    left = [r for r in after if after[r].phase == LEFT]
    going = [beat for r, beat in sorted(after.items()) if r not in silent and r not in left]
    least = min(((beat.moves, beat.passes) for beat in going), default=(0, 0))
    behind = [beat for beat in going if (beat.moves, beat.passes) == least]
    behind = [beat for beat in behind if not beat.stage] or behind
    if silent or left or len(behind) == len(going):
        behind = []
    claims = [f"{_ranks(silent, names, 'is', 'are')} silent"] if silent else []
    claims += [f"{_ranks(left, names, 'has', 'have')} ended"] if left else []
    for phase in sorted({beat.phase for beat in behind}):
        late = [beat.rank for beat in behind if beat.phase == phase]
        claims.append(f"{_ranks(late, names, 'has', 'have')} not left {phase}")
    waiting = Counter(readable(beat.stage) or beat.phase for beat in going if beat not in behind)
    if waiting and claims:
        claims.append(f"the others wait in {waiting.most_common(1)[0][0]}")
    elif waiting:
        claims.append(f"all ranks are in {waiting.most_common(1)[0][0]} and none is behind")
    step = min((beat.step for beat in going or after.values()), default=0)
    return f"stalled for {seconds:.0f} s {f'in step {step}' if step else 'at the start'}: {'; '.join(claims)}"


def readable(stage: str) -> str:
    """hop1_across as people write it: hop 1 across. Pure."""
    return stage.replace("_", " ").replace("hop", "hop ")


def _ranks(ranks: Sequence[int], names: Sequence[str], one: str, many: str) -> str:
    """The ranks by number and node, and the verb for one or many of them."""
    shown = [f"{rank} ({names[rank]})" for rank in sorted(ranks)[:4]]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    word, verb = ("ranks", many) if len(ranks) > 1 else ("rank", one)
    return f"{word} {', '.join(shown)}{more} {verb}"


def account_of(folder: Path) -> str | None:
    """The line that a stall left in the run's folder on this node, if there was one."""
    line = folder / "stall" / "line.txt"
    return line.read_text().strip() if line.exists() else None


class Watch:
    """Tells the others where this rank is, and ends the process with exit code 74 when the run stands still.

    with Watch(store, place, names, limits, folder) as watch:
        watch.at(step, "data")

    store   from `mics.ranks.meet`; a second connection to its server is made
    names   of the nodes, by rank
    folder  the run's, on this node

    The long limit holds until the first step is done: that is when `at` names a second step. Step 0 stands for all that
    comes before the first step.
    """

    def __init__(self, store: TCPStore, place: Place, names: Sequence[str], limits: LimitsConfig, folder: Path) -> None:
        self._place, self._names, self._limits, self._folder = place, names, limits, folder
        shortest = min(limits.first_step_seconds, limits.step_seconds)
        self._beat_seconds = min(LONGEST_BEAT_SECONDS, shortest / BEATS_PER_LIMIT)
        self._quiet_seconds = max(QUIET_SECONDS, QUIET_BEATS * self._beat_seconds)
        # torchrun's store outlives a restart of the ranks: what they said before must not end them again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        answer = timedelta(seconds=self._quiet_seconds + ANSWER_SECONDS)
        # A connection answers one question at a time: on a shared one a waiting collective would hold up the beats.
        mine = TCPStore(store.host, store.port, is_master=False, timeout=answer, wait_for_workers=False)
        self._store = PrefixStore(f"watch/{attempt}", mine)
        self._born = time.monotonic()
        # step, phase, moves, since, long; replaced whole, so it needs no lock
        self._place_now = (0, "start", 0, self._born, True)
        self._first_step = 0
        self._position: Callable[[], tuple[int, str | None]] = lambda: (0, None)
        self._over, self._called = threading.Event(), threading.Event()
        self._ending: threading.Thread | None = None
        self._line = folder / "stall" / "line.txt"
        try:
            for name in ("beats", "stall"):
                (folder / name).mkdir(exist_ok=True)
            self._line.unlink(missing_ok=True)
        except OSError as error:
            raise RunFolderError(f"{error.filename} cannot be made or written: {error.strerror}") from error
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._tell, self._guard)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ending:  # over what the ending of another rank has done to this one's connections
            self._ending.join()  # it ends the process
        self._over.set()
        for thread in self._threads:
            thread.join(self._beat_seconds)
        self.at(self._place_now[0], LEFT)
        _within(QUIET_SECONDS, self._post)  # where rank 0 served the store and is gone, nobody needs to know

    def at(self, step: int, phase: str, *, long: bool = False) -> None:
        """This rank is now in `phase` of `step` (from 1; 0 = before the first).

        long  the long limit holds: for what is not part of every step, such as a checkpoint
        """
        self._first_step = self._first_step or step
        long = long or step in (0, self._first_step)
        self._place_now = (step, phase, self._place_now[2] + 1, time.monotonic(), long)

    def follow(self, position: Callable[[], tuple[int, str | None]]) -> None:
        """From now on ask `position`, from another thread, for the collectives so far and the one in progress.

        `mics.collectives.Meter.current` knows. On CUDA the host only issues collectives, so what it is in says little
        there: NCCL's flight record does.
        """
        self._position = position

    def _beat(self) -> Beat:
        (step, phase, moves, _, _), (passes, stage) = self._place_now, self._position()
        return Beat(self._place.rank, time.monotonic() - self._born, step, phase, moves, passes, stage or "")

    def _post(self) -> None:
        self._store.set(f"beat/{self._place.rank}", json.dumps(asdict(self._beat())))

    def _tell(self) -> None:
        """The thread that speaks with the store; it may wait for it forever."""
        try:
            while not self._over.is_set():
                self._post()
                if self._store.check(["judge"]):
                    self._called.set()
                self._over.wait(self._beat_seconds)
        except dist.DistError:
            return  # the store has ended with the process that served it; the limits still hold

    def _guard(self) -> None:
        """The thread that looks at the clock."""
        while not self._over.wait(self._beat_seconds):
            self._write()
            seconds = time.monotonic() - self._place_now[3]
            if seconds > self.limit_seconds or self._called.is_set():
                self._ending = threading.Thread(target=self._end, args=(seconds,), daemon=True)
                self._ending.start()
                break
        while not self._over.wait(self._beat_seconds):  # a rank that ends the run is not silent
            self._write()

    def _write(self) -> None:
        mine = self._beat_file(self._place.rank)
        partial = mine.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk: the clock goes on, and the store has the beats too
            partial.write_text(json.dumps(asdict(self._beat())) + "\n")
            partial.replace(mine)

    @property
    def limit_seconds(self) -> float:
        """How long this rank may stay where it is."""
        return self._limits.first_step_seconds if self._place_now[4] else self._limits.step_seconds

    def _end(self, seconds: float) -> None:
        try:
            self._account(seconds)
        except OSError as error:  # a full disk must not keep the run standing still
            os.write(2, f"mics: stalled for {seconds:.0f} s, and there is no account of it: {error}\n".encode())
        finally:
            os._exit(STALLED)

    def _account(self, seconds: float) -> None:
        with (self._folder / "stall" / f"rank-{self._place.rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        wait_for_record = flight_record(os.environ, self._place.rank)
        judged = _within(self._quiet_seconds + ANSWER_SECONDS, lambda: self._judge(seconds))
        line, speaks = judged or (self._judge_alone(seconds), None)
        try:
            with self._line.open("x") as file:
                file.write(f"{line}\n")
            first_here = True
        except FileExistsError:
            first_here = False
        if speaks or (speaks is None and first_here):
            os.write(2, f"mics: {line}\n".encode())  # not sys.stderr: the main thread may hold its lock
        wait_for_record()
        if self._place.rank == 0:
            time.sleep(QUIET_SECONDS)  # the store may live in this process, and the others still read the line

    def _judge(self, seconds: float) -> tuple[str, bool]:
        """The line, and whether this rank is the one that says it."""
        me = str(self._place.rank)
        if self._store.compare_set("judge", "", me).decode() != me:
            while not self._store.check(["line"]):  # a blocking wait would hold the connection, and with it the beats
                time.sleep(0.2)
            return self._store.get("line").decode(), False
        line = self._verdict(range(self._place.world_size), self._told, seconds)
        self._store.set("line", line)
        return line, True

    def _judge_alone(self, seconds: float) -> str:
        """Where the store does not answer: from the files of this node's ranks."""
        first = self._place.rank - self._place.local_rank
        line = self._verdict(range(first, first + self._place.local_world_size), self._written, seconds)
        here, there = self._names[self._place.rank], self._names[0]
        return f"{line} (seen from {here} alone: the store on {there} does not answer)"

    def _verdict(self, ranks: range, look: Callable[[int], str], seconds: float) -> str:
        """From two looks at these ranks' last beats; `look` gives one as text, "" where there is none."""
        before = {rank: _beat_of(look(rank), rank) for rank in ranks}
        time.sleep(self._quiet_seconds)
        after = {rank: _beat_of(look(rank), rank) for rank in ranks}
        return verdict(before, after, self._names, seconds=seconds)

    def _beat_file(self, rank: int) -> Path:
        return self._folder / "beats" / f"rank-{rank}.json"

    def _told(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _written(self, rank: int) -> str:
        file = self._beat_file(rank)
        return file.read_text() if file.exists() else ""


def _beat_of(text: str, rank: int) -> Beat:
    """A rank that never told anything stands at the very start, and is silent."""
    return Beat(**json.loads(text)) if text else Beat(rank, 0.0, 0, "start", 0, 0, "")


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns, or None where the store fails or lets it wait longer: some of its waits have no limit."""
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except dist.DistError:
            answers.put(None)

    threading.Thread(target=answer, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None


def flight_record(environment: Mapping[str, str], rank: int) -> Callable[[], None]:
    """Ask NCCL for the record of its last collectives; what is returned waits until the record is written.

    torch reads three public variables when the process group is made, and without them nothing happens here:
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE (a write into <it><rank>.pipe asks), TORCH_FR_DUMP_TEMP_FILE (the record goes to
    <it><rank>), TORCH_FR_BUFFER_SIZE (collectives that it holds).
    """
    pipe = Path(f"{environment.get('TORCH_NCCL_DEBUG_INFO_PIPE_FILE', '')}{rank}.pipe")
    target = Path(f"{environment.get('TORCH_FR_DUMP_TEMP_FILE', '')}{rank}")
    if not pipe.is_fifo():
        return lambda: None
    target.unlink(missing_ok=True)  # of an earlier attempt
    try:
        asked = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # ENXIO: a pipe of an earlier attempt, which nobody reads
        return lambda: None
    os.write(asked, b"1")
    os.close(asked)

    def wait() -> None:
        deadline, size = time.monotonic() + RECORD_SECONDS, 0
        while time.monotonic() < deadline:
            time.sleep(0.5)
            last, size = size, target.stat().st_size if target.exists() else 0
            if size and size == last:
                return

    return wait
