"""Train the same model in several ways on the same machines, in turns, and measure each step.

torchrun starts the processes, as for mics.train:

  torchrun --nnodes NODES --nproc-per-node DEVICES -m mics.bench --config run.json

The model, the batch and the machines stand in run.json; its strategy, partition, data, accumulation and steps do not
count. What is compared stands in bench.json beside it. Their folder gets metrics.jsonl: one line of JSON per entry and
step. Tokens are random, so no data is needed.

Exit codes, each but 0 with a line on stderr that says why:
  0   done
  2   run.json or bench.json cannot be used on these machines
  73  metrics.jsonl cannot be written
  74  a rank stood still for longer than limits.step_seconds; the folder `stall` has every rank's stack
Anything else is a crash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mics import settings
from mics.bench.contender import Setting
from mics.bench.deepspeed import check_deepspeed
from mics.bench.rounds import race
from mics.config import RunConfig
from mics.entries import BenchConfig, Entry, grid_of
from mics.errors import RunFolderError, RunRefusedError
from mics.job import check_same
from mics.lines import Lines
from mics.metrics import InterfaceCounter
from mics.program import joined, refused, unwritable
from mics.ranks import Place, leave, together
from mics.train import At, nowhere


def read(config: Path) -> tuple[RunConfig, BenchConfig]:
    """run.json, and bench.json beside it. Raises RunRefusedError."""
    bench = config.with_name("bench.json")
    try:
        return RunConfig.read(config), BenchConfig.read(bench)
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"{config} and {bench.name}: {error}") from error


def check(config: BenchConfig, run: RunConfig, device: torch.device) -> None:
    """Raises RunRefusedError where the nodes of this run cannot have one of the entries."""
    if config.emulated_compute_seconds and device.type != "cpu":
        raise RunRefusedError("emulated computation waits on the host, which says nothing about a GPU")
    for entry in config.entries:
        _check(entry, run)


def _check(entry: Entry, run: RunConfig) -> None:
    try:
        grid_of(entry, nodes=run.nodes, devices_per_node=run.devices_per_node)
        if entry.strategy.startswith("deepspeed-"):
            check_deepspeed(run)
        if entry.strategy.startswith("fsdp2") and run.precision == "fp16":
            raise ValueError("FSDP2 as it comes has no loss scale, which fp16 needs")
    except (ValueError, RunRefusedError) as error:
        raise RunRefusedError(f"entry {entry.name}: {error}") from error


def readable(line: Mapping[str, Any], *, steps: int) -> str:
    """A line of metrics.jsonl for people. Pure."""
    sent = line["counted_bytes"] if line["traffic_bytes"] is None else line["traffic_bytes"]
    return (
        f"step {line['step']}/{steps}  round {line['round']}{' (warm-up)' if line['warmup'] else ''}  {line['entry']}  "
        f"{line['step_seconds']:.2f} s  loss {float('nan') if line['loss'] is None else line['loss']:.4f}"
        + ("" if sent is None else f"  sent {sent / 1e6:.1f} MB/node")
    )


def bench(
    run: RunConfig, config: BenchConfig, folder: Path, place: Place, device: torch.device, at: At = nowhere
) -> None:
    """Measure every entry; rank 0 writes metrics.jsonl in `folder`. Collective over all ranks, after `join`.

    Raises RunRefusedError on all of them where one cannot have its part, RunFolderError on rank 0 alone.
    """
    together(lambda: check(config, run, device), place)
    interface = together(lambda: InterfaceCounter(run.interface, reads=place.local_rank == 0), place)
    steps = (config.warmup_steps + config.steps) * len(config.entries)
    lines = Lines(folder / "metrics.jsonl", partial(readable, steps=steps), writes=place.rank == 0)
    for line in race(config, Setting(run, place, device, config.emulated_compute_seconds), interface, at):
        lines.write(line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mics.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, metavar="run.json", help="the run; bench.json beside it")
    config: Path = parser.parse_args(arguments).config
    settings.share_freed_memory()
    try:
        _run(*read(config), config.parent)
    except RunRefusedError as error:
        return refused(error)
    except RunFolderError as error:
        return unwritable(error)
    leave()
    return 0


def _run(run: RunConfig, config: BenchConfig, folder: Path) -> None:
    with joined(run, folder) as (place, device, watch):
        check_same(config.to_json(), "another bench.json", place)
        bench(run, config, folder, place, device, watch.at)


if __name__ == "__main__":
    sys.exit(main())
