"""How fast is this network? The engine's own collectives and one plain TCP stream, timed on all nodes.

torchrun starts one process per device, as for mics.train:

  torchrun --nnodes NODES --nproc-per-node DEVICES -m mics.measure --config run.json

What to time stands in measure.json beside run.json (see mics.probes); of run.json only the machines count.
metrics.jsonl beside them gets one line of JSON per measurement: the link, each collective at each size, and at the end
the line through the sizes of each collective.

Exit codes, each but 0 with a line on stderr that says why:
  0   done
  2   run.json or measure.json cannot be used, or the nodes do not reach each other
  73  metrics.jsonl cannot be written
  74  a rank stood still for longer than limits.step_seconds
  143 stopped by SIGTERM or Ctrl-C
Anything else is a crash.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mics.alphabeta import Point, fit
from mics.config import RunConfig
from mics.errors import RunFolderError, RunRefusedError
from mics.job import check_same
from mics.lines import Lines
from mics.probes import Cell, Collective, MeasureConfig, Pair, cells, pairings
from mics.program import STOPPED_UNSAVED, joined, noted_signals, refused, unwritable
from mics.ranks import Place, leave
from mics.sharding import Connection, connect, disconnect
from mics.stream import Rates, one_way
from mics.train import read_run
from mics.turns import Timed, all_reduce_pass, gather_pass, in_turns, memory_for, reduce_scatter_pass

Write = Callable[[Mapping[str, Any]], None]
At = Callable[[str], None]
PASSES: Mapping[Collective, Callable[[Connection, float, torch.Tensor], Timed]] = {
    "gather": gather_pass,
    "reduce_scatter": reduce_scatter_pass,
    "all_reduce": all_reduce_pass,
}


def measure(
    wanted: MeasureConfig,
    timed: Sequence[Cell],
    place: Place,
    device: torch.device,
    *,
    write: Write,
    at: At,
    asked_to_stop: Callable[[], bool],
) -> bool:
    """Measure all of it; returns whether it came to the end. Collective over the world.

    write          gets each record, on every rank alike
    at             told what begins
    asked_to_stop  whether this rank is
    """
    measure_links(wanted, place, write, at)
    sizes = sorted(wanted.message_bytes) if timed else []
    grids = {cell.grid for cell in timed} if sizes else set()
    at("connect")
    connections = {grid: connect(grid, device=device.type) for grid in sorted(grids, key=str)}
    points: dict[Cell, list[Point]] = {cell: [] for cell in timed}
    started, until, stopped = time.perf_counter(), 0.0, False

    def enough() -> bool:
        at("the next repeat")  # all of them may take longer than one phase may
        return asked_to_stop() or time.perf_counter() >= until

    for number, size in enumerate(sizes, 1):
        until = started + wanted.seconds * number / len(sizes)  # what a size leaves, the next may use
        memory = memory_for(size, place.world_size, device)
        passes = [PASSES[cell.collective](connections[cell.grid], size, memory) for cell in timed]
        for cell, one in zip(timed, passes, strict=True):
            at(f"first {cell} of {size} bytes")
            one()
        at(f"collectives of {size} bytes")
        rows = in_turns(passes, repeats=wanted.repeats, enough=enough, device=device)
        for cell, seconds in zip(timed, zip(*rows, strict=True), strict=True):
            points[cell].append((size, statistics.median(seconds)))
            write(record_of(cell, size, seconds))
        stopped = _any(asked_to_stop(), device)
        if stopped:
            break
    for connection in connections.values():
        disconnect(connection)
    for cell, through in points.items():
        if len({size for size, _ in through}) > 1:
            write(fit_of(cell, through))
    return not stopped


def measure_links(wanted: MeasureConfig, place: Place, write: Write, at: At) -> None:
    """One TCP stream forth and then back, between nodes 0 and 1, or between every two nodes in rounds."""
    nodes = place.world_size // place.local_world_size
    if nodes == 1 or not wanted.tcp_seconds:
        return
    for pairs in pairings(nodes) if wanted.pairs else (((0, 1),),):
        at("link")
        forth = one_way(list(pairs), place, seconds=wanted.tcp_seconds)
        back = one_way([(b, a) for a, b in pairs], place, seconds=wanted.tcp_seconds)
        for pair, there, here in zip(pairs, forth, back, strict=True):
            write(link_of(pair, there, here))


def link_of(pair: Pair, forth: Rates, back: Rates) -> dict[str, Any]:
    """One line of metrics.jsonl for a link. Pure."""
    middle = statistics.median([forth.median, back.median])
    return {
        "kind": "link",
        "nodes": list(pair),
        "bytes_per_second": middle,
        "forth": asdict(forth),
        "back": asdict(back),
    }


def record_of(cell: Cell, message_bytes: int, seconds: Sequence[float]) -> dict[str, Any]:
    """One line of metrics.jsonl for a collective at one size. Pure.

    seconds               of the slowest rank, by repeat
    bytes_per_second      that left each node; None where nothing does
    bus_bytes_per_second  that a flat ring would send from each device: what NCCL's tests call bus bandwidth
    """
    median, traffic = statistics.median(seconds), cell.traffic_bytes(message_bytes)
    return {
        "kind": "collective",
        **_name(cell),
        "message_bytes": message_bytes,
        "repeats": len(seconds),
        "seconds": {"median": median, "min": min(seconds), "max": max(seconds)},
        "traffic_bytes_per_node": traffic,
        "bytes_per_second": traffic / median or None,
        "bus_bytes_per_second": cell.ring_bytes(message_bytes) / median,
    }


def fit_of(cell: Cell, points: Sequence[Point]) -> dict[str, Any]:
    """One line of metrics.jsonl for a collective over all its sizes: its latency, and its rates without that. Pure.

    The rates are None where the seconds do not grow with the size.
    """
    line = fit(points)

    def rate(size_bytes: float) -> float | None:
        return (size_bytes / line.seconds_per_byte or None) if line.seconds_per_byte else None

    return {
        "kind": "fit",
        **_name(cell),
        "latency_seconds": line.latency_seconds,
        "seconds_per_byte": line.seconds_per_byte,
        "bytes_per_second": rate(cell.traffic_bytes(1.0)),
        "bus_bytes_per_second": rate(cell.ring_bytes(1.0)),
        "left_out_bytes": line.outlier[0] if line.outlier else None,
    }


def _name(cell: Cell) -> dict[str, Any]:
    grid = cell.grid
    return {
        "collective": cell.collective,
        "partition_size": grid.partition_size,
        "hierarchical": grid.hierarchical,
    }


def readable(record: Mapping[str, Any]) -> str:
    """A record as one line for people. Pure."""
    rate = record["bytes_per_second"] or record["bus_bytes_per_second"]
    said = f"{rate / 1e6:.1f} MB/s" if rate else "no rate"
    if record["kind"] == "link":
        return "TCP between nodes {} and {}: {}".format(*record["nodes"], said)
    form = "hierarchical " if record["hierarchical"] else ""
    name = f"{form}{record['collective'].replace('_', '-')} p={record['partition_size']}"
    per = "per node" if record["bytes_per_second"] else "per device"
    if record["kind"] == "fit":
        return f"{name}: {record['latency_seconds'] * 1e3:.2f} ms + {said} {per}"
    return f"{name} of {record['message_bytes']} bytes: {record['seconds']['median'] * 1e3:.2f} ms, {said} {per}"


def _any(here: bool, device: torch.device) -> bool:
    flag = torch.tensor(float(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mics.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="run.json", help="the run; measure.json lies beside it"
    )
    config: Path = parser.parse_args(arguments).config
    signals = noted_signals()
    try:
        run, wanted = read_run(config), _read_measure(config.with_name("measure.json"))
        done = _run(run, wanted, config.parent, signals)
    except RunRefusedError as error:
        return refused(error)
    except RunFolderError as error:
        return unwritable(error)
    leave()
    return 0 if done else STOPPED_UNSAVED


def _read_measure(path: Path) -> MeasureConfig:
    try:
        return MeasureConfig.read(path)
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{path}: {error}") from error


def _run(run: RunConfig, wanted: MeasureConfig, folder: Path, signals: Sequence[int]) -> bool:
    try:
        timed = cells(wanted, world_size=run.world_size, devices_per_node=run.devices_per_node)
    except ValueError as error:
        raise RunRefusedError(f"measure.json: {error}") from error
    with joined(run, folder) as (place, device, watch):
        check_same(wanted.to_json(), "another measure.json", place)
        lines = Lines(folder / "metrics.jsonl", readable, writes=place.rank == 0)
        done = measure(
            wanted,
            timed,
            place,
            device,
            write=lines.write,
            at=lambda phase: watch.at(lines.count, phase),
            asked_to_stop=lambda: bool(signals),
        )
    if signals and not done:
        sys.stderr.write(f"mics: {signal.Signals(signals[0]).name}: stopped measuring\n")
    return done


if __name__ == "__main__":
    sys.exit(main())
