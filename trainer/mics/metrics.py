"""What a step cost: measured on every rank, brought together in one small exchange, one JSON line from rank 0."""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mics.checkpoint import Progress
from mics.collectives import STAGES, StageCount, StageName
from mics.config import RunConfig
from mics.errors import RunRefusedError
from mics.precision import DTYPES
from mics.traffic import Traffic, per_step

INTERFACES = Path("/proc/net/dev")


@dataclass(frozen=True)
class RankStep:
    """What one rank saw of one step.

    loss             its share of the step's mean loss, in nats per token
    stopping         it was asked to end (SIGTERM)
    interface_bytes  sent by its node's interface; 0 where another rank of the node reads it, or none does
    memory_bytes     see `memory_bytes`
    """

    loss: float
    stopping: bool
    interface_bytes: int
    memory_bytes: int
    stages: dict[StageName, StageCount]


def exchange(mine: RankStep, device: torch.device) -> list[RankStep]:
    """Every rank's measurements on every rank: one gather of 19 float64 per rank. Collective over all ranks."""
    counts = [mine.stages[stage] for stage in STAGES]
    row = torch.tensor(
        [mine.loss, mine.stopping, mine.interface_bytes, mine.memory_bytes]
        + [number for count in counts for number in (count.calls, count.traffic_bytes, count.seconds)],
        dtype=torch.float64,
        device=device,
    )
    rows = row.new_empty(dist.get_world_size() * len(row))
    dist.all_gather_single(rows, row)
    return [_unpack(values) for values in rows.view(-1, len(row)).tolist()]


def _unpack(values: Sequence[float]) -> RankStep:
    loss, stopping, interface, memory, *rest = values
    stages = {
        stage: StageCount(int(rest[3 * i]), int(rest[3 * i + 1]), rest[3 * i + 2]) for i, stage in enumerate(STAGES)
    }
    return RankStep(loss, bool(stopping), int(interface), int(memory), stages)


def record_of(
    ranks: Sequence[RankStep],
    run: RunConfig,
    progress: Progress,
    *,
    tokens: int,
    grad_norm: float,
    lr: float,
    step_seconds: float,
) -> dict[str, Any]:
    """One line of metrics.jsonl. Pure.

    step                   optimizer steps done, from 1
    samples                sequences seen since the start of the run, over all ranks
    loss                   mean over the step's valid tokens, nats
    traffic                bytes sent per node by stage, mean over nodes, as counted in the communicators
    traffic_seconds        by stage, mean over ranks; stages overlap
    traffic_bytes          sent per node, mean over nodes; traffic_source says by what: the node's "interface" (headers
                           and everything else that it sends included) or "counted" (the sum of `traffic`)
    traffic_formula_bytes  what `mics.traffic` predicts for this run
    memory_bytes           the rank with most; memory_source says of what
    """
    traffic = {stage: sum(rank.stages[stage].traffic_bytes for rank in ranks) / run.nodes for stage in STAGES}
    read = sum(rank.interface_bytes for rank in ranks) / run.nodes
    return {
        "step": progress.step,
        "samples": progress.samples,
        "tokens": tokens,
        "loss": sum(rank.loss for rank in ranks),
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens_per_second": tokens / step_seconds,
        "step_seconds": step_seconds,
        "traffic": traffic,
        "traffic_seconds": {s: statistics.fmean(rank.stages[s].seconds for rank in ranks) for s in STAGES},
        "traffic_bytes": read if run.interface else sum(traffic.values()),
        "traffic_source": "interface" if run.interface else "counted",
        "traffic_formula_bytes": formula(run).total,
        "memory_bytes": max(rank.memory_bytes for rank in ranks),
        "memory_source": memory_source(),
    }


def formula(run: RunConfig) -> Traffic:
    """Predicted bytes per node and step. Pure."""
    shape, dtypes = run.train.shape, DTYPES[run.precision]
    blocks, root = shape.layers * shape.block_parameters, shape.root_parameters
    return per_step(
        run.grid,
        block_bytes=blocks * dtypes.gather.itemsize,
        root_bytes=root * dtypes.gather.itemsize,
        block_gradient_bytes=blocks * dtypes.reduce.itemsize,
        root_gradient_bytes=root * dtypes.reduce.itemsize,
        micro_steps=run.train.accumulation,
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
    """Bytes that this node's interface sent between two moments. Reads on one rank per node, else counts nothing."""

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._last = self._read()

    def restart(self) -> None:
        """Leave out what was sent since the last read (a checkpoint). Collective over all ranks.

        Between two barriers: the other ranks' bytes belong to neither side of the read.
        """
        dist.barrier()
        self._last = self._read()
        dist.barrier()

    def take(self) -> int:
        before, self._last = self._last, self._read()
        return self._last - before

    def _read(self) -> int:
        return sent_bytes(self._interface, INTERFACES.read_text()) if self._interface else 0


def lines_until(text: str, step: int) -> str:
    """The lines of metrics.jsonl up to `step`: later ones come again, and the last may be cut by a kill. Pure."""
    return "".join(f"{line}\n" for line in text.splitlines() if _step_of(line) <= step)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf


class StepLog:
    """Rank 0's two outputs: metrics.jsonl, and a line for the reader (rewritten in place on a terminal).

    start   steps that the run has already done; the file keeps their lines only
    steps   steps at the end of the run
    """

    def __init__(self, path: Path, *, start: int, steps: int, screen: TextIO = sys.stdout) -> None:
        kept = lines_until(path.read_text(), start) if path.exists() else ""
        partial = path.with_suffix(".partial")
        partial.write_text(kept)
        partial.replace(path)
        self._path = path
        self._steps = steps
        self._screen = screen
        self._seconds: list[float] = []

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._seconds.append(record["step_seconds"])
        eta = statistics.median(self._seconds) * (self._steps - record["step"])
        line = readable(record, steps=self._steps, eta_seconds=eta)
        if self._screen.isatty():
            end = "\n" if record["step"] == self._steps else ""
            self._screen.write(f"\r{line}\x1b[K{end}")
        else:
            self._screen.write(f"{line}\n")
        self._screen.flush()


def readable(record: dict[str, Any], *, steps: int, eta_seconds: float) -> str:
    """A record as one line for people. Pure."""
    minutes, seconds = divmod(round(eta_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  norm {record['grad_norm']:.2f}  "
        f"lr {record['lr']:.2e}  {record['step_seconds']:.2f} s  {record['tokens_per_second']:,.0f} tok/s  "
        f"sent {record['traffic_bytes'] / 1e6:.1f} MB/node  eta {hours}:{minutes:02}:{seconds:02}"
    )
