"""What is compared with what, on machines with n ranks, k on a node. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

from mics.config import Precision
from mics.entries import PEERS, Entry
from mics.shapes import ModelShape
from mics.strategies import STRATEGIES
from mics.topology import partition_sizes

from micsctl.errors import UsageError

# equal blocks and a small root: 16.8 M parameters, of which 0.8 % lie outside the blocks
DEFAULT_MODEL = ModelShape(hidden=416, layers=8, heads=8, vocabulary=256, positions=64)
# smaller, for bytes; its matrices have the 1e5 elements below which DeepSpeed keeps weights gathered from step to step
TRAFFIC_MODEL = ModelShape(hidden=416, layers=2, heads=8, vocabulary=256, positions=256)
# many small blocks, as large models have: hop 2 of the block that comes last can hide under nothing
SCALING_MODEL = ModelShape(hidden=144, layers=12, heads=4, vocabulary=256, positions=64)
MICRO_STEPS = 4
MOST_MICRO_STEPS = 64  # of strong scaling on one node
KNOWN = (*STRATEGIES, *PEERS)
_DIGITS = 12  # of a number on the command line


def chosen(names: str | None) -> tuple[str, ...]:
    """Strategies from the command line, `mics,zero3`; all that are known where it says nothing.

    Raises UsageError for an unknown one, with the nearest match.
    """
    asked = tuple(name.strip() for name in names.split(",")) if names is not None else KNOWN
    for name in asked:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KNOWN)}"
            raise UsageError(f"unknown strategy {name!r}", hint)
    return tuple(dict.fromkeys(asked))


def sizes(text: str, *, most: int) -> tuple[int, ...]:
    """Numbers of nodes from the command line, `1,2,4,8`, ascending. Raises UsageError."""
    found = tuple(sorted({_number(part, "number of nodes") for part in text.split(",")}))
    if found[0] < 1 or found[-1] > most:
        raise UsageError(f"--sizes {text} is not possible", f"there are 1 to {most} nodes", next="--sizes 1,2")
    if (micro_steps := math.lcm(*found) // found[0]) > MOST_MICRO_STEPS:
        why = f"to share one batch out evenly, {found[0]} nodes would make {micro_steps} micro-steps"
        raise UsageError(f"--sizes {text} is not possible", why, next="--sizes 1,2,4,8")
    return found


def link_rates(text: str) -> tuple[int, ...]:
    """Link rates from the command line, `100,400`, in Mbit/s. Raises UsageError."""
    found = tuple(dict.fromkeys(_number(part, "link rate") for part in text.split(",")))
    if not all(1 <= rate <= 100_000 for rate in found):
        raise UsageError(f"--links {text} is not possible", "rates are 1 to 100000 Mbit/s", next="--links 100,400")
    return found


def _number(text: str, what: str) -> int:
    if not text.strip().isdecimal() or len(text) > _DIGITS:
        raise UsageError(f"{text.strip()[:_DIGITS]!r} is no {what}", "numbers are separated by commas", next="1,2,4")
    return int(text)


def shapes(nodes: int, devices_per_node: int | None) -> tuple[tuple[int, int], ...]:
    """Nodes and devices on each, for `bench traffic`: with 1, 2 and 4 devices and as many ranks as `nodes` of two have,
    unless the number of devices is given."""
    if devices_per_node is not None:
        return ((nodes, devices_per_node),)
    return tuple((2 * nodes // k, k) for k in (1, 2, 4) if 2 * nodes % k == 0 and 2 * nodes > k)


def strategies(
    names: Sequence[str], *, world_size: int, devices_per_node: int, on_cpu: bool, micro_steps: int = MICRO_STEPS
) -> tuple[Entry, ...]:
    """The rows of `bench strategies`.

    mics at p = k; flat and in two stages at p = 2k; with hop 2 at every micro-step, as HSDP's all-reduce; the rest at
    their own p. On CPU zero3 with each reduce-scatter: GPUs always use NCCL's.
    """
    n, k = world_size, devices_per_node
    found: list[Entry] = []
    for name in names:
        match name:
            case "mics":
                found.append(_entry("mics", k, micro_steps))
                found.append(_entry("mics", k, micro_steps, hop2_every_micro_step=True))
                if k > 1:
                    found.append(_entry("mics", 2 * k, micro_steps, hierarchical=True))
            case "mics-flat":
                found.append(_entry("mics-flat", 2 * k, micro_steps))
            case "zero3" if on_cpu:
                found += [_entry("zero3", n, micro_steps, reduce_scatter=kind) for kind in ("ring", "native", "direct")]
            case _:
                found += _fixed(name, n, k, micro_steps, on_cpu=on_cpu)
    return tuple(entry for entry in found if n % entry.partition_size == 0)


def traffic(
    names: Sequence[str], *, world_size: int, devices_per_node: int, on_cpu: bool, micro_steps: Sequence[int] = (1, 4)
) -> tuple[Entry, ...]:
    """The cells of `bench traffic`: every strategy at every p and number of micro-steps."""
    n, k = world_size, devices_per_node
    found: list[Entry] = []
    for s in micro_steps:
        for name in names:
            if name == "mics":
                found += [_entry("mics", p, s, hierarchical=p > k > 1) for p in partition_sizes(n, k)]
                found += [_entry("mics", k, s, hop2_every_micro_step=True)] if s > 1 else []
            elif name == "mics-flat":
                found += [_entry("mics-flat", p, s) for p in partition_sizes(n, k) if p > k]
            elif name == "zero3" and on_cpu:
                found += [_entry("zero3", n, s, reduce_scatter=kind) for kind in ("ring", "native", "direct")]
            else:
                found += _fixed(name, n, k, s, on_cpu=on_cpu)
    return tuple(found)


def crossover(*, world_size: int, devices_per_node: int, micro_steps: int = MICRO_STEPS) -> tuple[Entry, Entry]:
    """zero3 with the ring, and mics at p = k."""
    return _entry("zero3", world_size, micro_steps), _entry("mics", devices_per_node, micro_steps)


def _fixed(name: str, n: int, k: int, s: int, *, on_cpu: bool) -> list[Entry]:
    native = "native" if on_cpu else "ring"  # the peers' own collectives; NCCL's is a ring
    match name:
        case "ddp":
            return [_entry(name, 1, s)]
        case "fsdp2-hsdp":  # with one replica it is fsdp2, with one device to share the model it is ddp
            return [_entry(name, k, s, reduce_scatter=native)] if 1 < k < n else []
        case "deepspeed-hpz":  # its second copy is spread over the devices of a node
            return [_entry(name, n, s, reduce_scatter=native)] if k > 1 else []
        case "fsdp2":
            return [_entry(name, n, s, reduce_scatter=native)]
        case "deepspeed-zero3":
            return [_entry(name, n, s, reduce_scatter=native, second_gather=forced) for forced in (False, True)]
        case _:
            return [_entry(name, n, s)]


def _entry(strategy: str, partition_size: int, micro_steps: int, **more: object) -> Entry:
    entry = Entry("", strategy, partition_size, micro_steps=micro_steps, **more)  # type: ignore[arg-type]  # fields of Entry
    return Entry(**{**vars(entry), "name": name_of(entry)})


def label(entry: Entry) -> str:
    """The strategy, with what is unusual about it."""
    parts = [entry.strategy]
    parts += ["hop 2 every micro-step"] if entry.hop2_every_micro_step else []
    parts += ["second gather"] if entry.second_gather else []
    return ", ".join(parts)


def name_of(entry: Entry) -> str:
    """Unique among the entries of one benchmark."""
    name = f"{label(entry)}, p = {entry.partition_size}"
    name += ", hierarchical" if entry.hierarchical else ""
    name += f", {entry.reduce_scatter}" if entry.reduce_scatter != "ring" and entry.strategy not in PEERS else ""
    return name + (f", s = {entry.micro_steps}" if entry.micro_steps != MICRO_STEPS else "")


def refused(names: Sequence[str], *, precision: Precision, with_deepspeed: bool) -> Mapping[str, str]:
    """Why nodes cannot run some of these strategies, by their names.

    with_deepspeed  whether it is installed there
    """
    found = {}
    for name in names:
        if name in PEERS and precision == "fp16":
            found[name] = "peers as they come have no loss scale of ours, which fp16 needs"
        elif name.startswith("deepspeed-") and precision == "fp64":
            found[name] = "DeepSpeed is compared in fp32 and bf16"
        elif name.startswith("deepspeed-") and not with_deepspeed:
            found[name] = "DeepSpeed (extra bench) is not installed on the nodes"
    return found


def missing(names: Sequence[str], entries: Sequence[Entry], *, world_size: int, devices_per_node: int) -> list[str]:
    """Of which strategies these machines have no entry, and why."""
    n, k, there = world_size, devices_per_node, {entry.strategy for entry in entries}
    why = f"not on {n // k} x {k}, where it would be another strategy or its partition groups do not fit"
    found = [f"{name}: left out, {why}" for name in names if name not in there]
    if "mics" in there and k > 1 and not any(entry.partition_size == 2 * k for entry in entries):
        found.append(f"mics at p = {2 * k}: left out, {2 * k} does not divide {n} ranks")
    return found
