"""What a step cost: measured on every rank, brought together in one small exchange, one JSON line from rank 0."""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mics.board import Board
from mics.collectives import STAGES, StageCount, StageName
from mics.config import Checkpointing, RunConfig
from mics.errors import RunFolderError, RunRefusedError
from mics.models.built import Built
from mics.peak import peak_flops
from mics.precision import DTYPES
from mics.timer import Part
from mics.traffic import Traffic, per_step

INTERFACES = Path("/proc/net/dev")
ETA_STEPS = 200  # the median of so many gives the time that is left

# Share of the forward pass's FLOPs that the backward pass does again. Selective checkpointing keeps what takes FLOPs
# (mics.recompute); with full, head and loss are outside of the blocks and so counted once too often.
RECOMPUTED: Mapping[Checkpointing, float] = {"none": 0.0, "selective": 0.0, "full": 1.0}


@dataclass(frozen=True)
class RankStep:
    """What one rank saw of one step.

    loss             its share of the step's mean loss, in nats per token
    stopping         it was asked to end (SIGTERM)
    interface_bytes  sent by its node's interface; 0 where another rank of the node reads it, or none does
    memory_bytes     see `memory_bytes`
    *_seconds        see `mics.timer`; compute on CPU is without the waits for collectives
    """

    loss: float
    stopping: bool
    interface_bytes: int
    memory_bytes: int
    data_seconds: float
    compute_seconds: float
    forward_seconds: float
    optimizer_seconds: float
    stages: Mapping[StageName, StageCount]


def rank_step(
    loss: float,
    stopping: bool,
    interface_bytes: int,
    seconds: Mapping[Part, float],
    stages: Mapping[StageName, StageCount],
    exposed_seconds: float,
) -> RankStep:
    """This rank's measurements: `seconds` from `StepTimer.take`, the rest from `Meter`."""
    return RankStep(
        loss,
        stopping,
        interface_bytes,
        memory_bytes(),
        seconds["data"],
        max(0.0, seconds["compute"] - exposed_seconds),
        seconds["forward"],
        seconds["optimizer"],
        stages,
    )


def exchange(mine: RankStep, device: torch.device) -> list[RankStep]:
    """Every rank's measurements on every rank: one gather of 23 float64 per rank. Collective over all ranks."""
    own = [mine.loss, mine.stopping, mine.interface_bytes, mine.memory_bytes]
    own += [mine.data_seconds, mine.compute_seconds, mine.forward_seconds, mine.optimizer_seconds]
    counts = [mine.stages[stage] for stage in STAGES]
    row = torch.tensor(
        own + [number for count in counts for number in (count.calls, count.traffic_bytes, count.seconds)],
        dtype=torch.float64,
        device=device,
    )
    rows = row.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_single(rows, row)
    return [_unpack(values) for values in rows.view(-1, len(row)).tolist()]


def _unpack(values: Sequence[float]) -> RankStep:
    loss, stopping, interface, memory, data, compute, forward, optimizer, *rest = values
    stages = {
        stage: StageCount(int(rest[3 * i]), int(rest[3 * i + 1]), rest[3 * i + 2]) for i, stage in enumerate(STAGES)
    }
    return RankStep(loss, bool(stopping), int(interface), int(memory), data, compute, forward, optimizer, stages)


@dataclass(frozen=True)
class Expected:
    """What is known of every step before the first.

    traffic_bytes        per node and step, by `mics.traffic`
    flops_per_token      of the forward pass
    peak_flops           of the device, dense 16-bit; None where the device is unknown or the run is not 16-bit
    """

    traffic_bytes: float
    flops_per_token: float
    peak_flops: float | None


def expected(run: RunConfig, built: Built) -> Expected:
    known = torch.cuda.is_available() and run.precision in ("bf16", "fp16")
    peak = peak_flops(torch.cuda.get_device_name()) if known else None
    return Expected(formula(run, built).total, built.flops_per_token, peak)


def record_of(
    ranks: Sequence[RankStep],
    run: RunConfig,
    expected: Expected,
    *,
    step: int,
    samples: int,
    tokens: int,
    grad_norm: float,
    lr: float,
    step_seconds: float,
    loss_scale: float,
    skipped: bool,
    skipped_in_row: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl; docs/metrics.md says what each key means. Pure.

    step     optimizer steps done, from 1
    samples  sequences seen since the start of the run, over all ranks
    tokens   targets of this step that count, over all ranks
    """
    traffic = {stage: sum(rank.stages[stage].traffic_bytes for rank in ranks) / run.nodes for stage in STAGES}
    read = sum(rank.interface_bytes for rank in ranks) / run.nodes
    tokens_per_second = run.global_batch * run.train.sequence / step_seconds
    forward_flops = expected.flops_per_token * tokens_per_second / run.world_size
    assert run.train.checkpointing != "auto"
    again = RECOMPUTED[run.train.checkpointing]
    return {
        "step": step,
        "samples": samples,
        "tokens": tokens,
        "loss": _finite(sum(rank.loss for rank in ranks)),
        "grad_norm": _finite(grad_norm),
        "lr": lr,
        "loss_scale": loss_scale,
        "skipped": skipped,
        "skipped_in_row": skipped_in_row,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens_per_second,
        "samples_per_second": run.global_batch / step_seconds,
        # A backward pass is twice the forward (Narayanan et al., arXiv 2104.04473, appendix).
        "tflops_per_device": 3 * forward_flops / 1e12,
        "tflops_per_device_with_recompute": (3 + again) * forward_flops / 1e12,
        "mfu": 3 * forward_flops / expected.peak_flops if expected.peak_flops else None,
        "data_seconds": statistics.fmean(rank.data_seconds for rank in ranks),
        "compute_seconds": statistics.fmean(rank.compute_seconds for rank in ranks),
        "optimizer_seconds": statistics.fmean(rank.optimizer_seconds for rank in ranks),
        "traffic_seconds": {s: statistics.fmean(rank.stages[s].seconds for rank in ranks) for s in STAGES},
        "traffic": traffic,
        "traffic_bytes": read if run.interface else sum(traffic.values()),
        "traffic_source": "interface" if run.interface else "counted",
        "traffic_formula_bytes": expected.traffic_bytes,
        "memory_bytes": max(rank.memory_bytes for rank in ranks),
        "memory_source": memory_source(),
    }


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else None


def formula(run: RunConfig, built: Built) -> Traffic:
    """Predicted bytes per node and step. Pure."""
    dtypes, blocks, root = DTYPES[run.precision], built.block_parameters, built.root_parameters
    return per_step(
        run.grid,
        block_bytes=blocks * dtypes.gather.itemsize,
        root_bytes=root * dtypes.gather.itemsize,
        block_gradient_bytes=blocks * dtypes.reduce.itemsize,
        root_gradient_bytes=root * dtypes.reduce.itemsize,
        micro_steps=run.train.accumulation,
        reshard=run.reshard,
    )


def memory_source() -> str:
    return "cuda_peak_allocated" if torch.cuda.is_available() else "process_peak_resident"


def memory_bytes() -> int:
    """Peak since the process began: what torch allocated on the GPU; on CPU the whole process, libraries included."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sent_bytes(interface: str, table: str) -> int:
    """Bytes that an interface has sent, from the text of /proc/net/dev. RunRefusedError where it is not there. Pure."""
    rows = dict(line.split(":", 1) for line in table.splitlines() if ":" in line)
    columns = {name.strip(): values.split() for name, values in rows.items()}
    if interface not in columns:
        raise RunRefusedError(f"interface {interface} is not on this node; it has {', '.join(columns)}")
    return int(columns[interface][8])  # 8 received columns, then the bytes sent


class InterfaceCounter:
    """Bytes that this node's interface sent between two moments; 0 where there is none to read.

    interface  the same on every rank; None = nothing is read anywhere
    reads      whether this rank does: one of each node
    """

    def __init__(self, interface: str | None, *, reads: bool) -> None:
        self._interface, self._reads = interface, reads
        self._last = self._read()

    def restart(self) -> None:
        """Leave out what was sent since the last read (a checkpoint). Collective over all ranks.

        Between two barriers: the other ranks' bytes belong to neither side of the read.
        """
        if self._interface:
            dist.barrier()
            self._last = self._read()
            dist.barrier()

    def take(self) -> int:
        before, self._last = self._last, self._read()
        return self._last - before

    def _read(self) -> int:
        return sent_bytes(self._interface, INTERFACES.read_text()) if self._interface and self._reads else 0


def lines_until(text: str, step: int) -> str:
    """The lines of metrics.jsonl up to `step`: later ones come again, and the last may be cut by a kill. Pure."""
    return "".join(f"{line}\n" for line in text.splitlines() if _step_of(line) <= step)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from error


class StepLog:
    """Rank 0's outputs: metrics.jsonl, a line for the reader (rewritten in place on a terminal), and the board.

    start   steps that the run has already done; the file keeps their lines only
    steps   steps at the end of the run
    board   TensorBoard, if wanted
    """

    def __init__(
        self, path: Path, *, start: int, steps: int, screen: TextIO = sys.stdout, board: Board | None = None
    ) -> None:
        with _writing(path):
            kept = lines_until(path.read_text(errors="replace"), start) if path.exists() else ""
            partial = path.with_suffix(".partial")
            partial.write_text(kept)
            partial.replace(path)
        self._path = path
        self._steps = steps
        self._screen = screen
        self._board = board
        self._seconds: deque[float] = deque(maxlen=ETA_STEPS)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record of `record_of`, whatever was added to it."""
        with _writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board:
            self._board.write(record)
        self._seconds.append(record["step_seconds"])
        eta = statistics.median(self._seconds) * (self._steps - record["step"])
        line = readable(record, steps=self._steps, eta_seconds=eta)
        if self._screen.isatty():
            end = "\n" if record["step"] == self._steps else ""
            self._screen.write(f"\r{line}\x1b[K{end}")
        else:
            self._screen.write(f"{line}\n")
        self._screen.flush()

    def note(self, text: str) -> None:
        """A line of its own for the reader."""
        self._screen.write(f"\r{text}\x1b[K\n" if self._screen.isatty() else f"{text}\n")
        self._screen.flush()


def readable(record: Mapping[str, Any], *, steps: int, eta_seconds: float) -> str:
    """A record as one line for people. Pure."""
    minutes, seconds = divmod(round(eta_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    loss, norm = (float("nan") if record[key] is None else record[key] for key in ("loss", "grad_norm"))
    extra = "  skipped" if record["skipped"] else ""
    extra += f"  validation {record['validation_loss']:.4f}" if "validation_loss" in record else ""
    extra += f"  mfu {record['mfu']:.1%}" if record["mfu"] else ""
    return (
        f"step {record['step']}/{steps}  loss {loss:.4f}  norm {norm:.2f}  "
        f"lr {record['lr']:.2e}  {record['step_seconds']:.2f} s  {record['tokens_per_second']:,.0f} tok/s  "
        f"sent {record['traffic_bytes'] / 1e6:.1f} MB/node{extra}  eta {hours}:{minutes:02}:{seconds:02}"
    )
