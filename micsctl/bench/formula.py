"""Bytes by formula: what an entry sends, and what it holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mics import traffic
from mics.config import Precision
from mics.entries import Entry, grid_of, traffic_bytes
from mics.shapes import ModelShape

from micsctl.bench.model import Site
from micsctl.planner.memory import WIDTHS

# Parameters: half of DeepSpeed's reuse distance (1e9), as the first layer's weights return after those of a forward and
# a backward pass. A smaller model's weights are kept for the backward pass.
DEEPSPEED_KEEPS_BELOW = 5e8
_RANK_BYTES = 400e6  # of a process that has imported torch
_OVER_HELD = 1.4  # what a CPU process takes over what it holds: activations, buffers, free pieces


def sent_bytes(entry: Entry, shape: ModelShape, precision: Precision, site: Site) -> float:
    """Payload that leaves a node in an optimizer step."""
    width, blocks = WIDTHS[precision], shape.layers * shape.block_parameters
    reduced = width.weights if entry.strategy.startswith("deepspeed-") else width.reduced
    return traffic_bytes(
        entry,
        nodes=site.nodes,
        devices_per_node=site.ranks_per_node,
        block_bytes=width.weights * blocks,
        root_bytes=width.weights * shape.root_parameters,
        block_gradient_bytes=reduced * blocks,
        root_gradient_bytes=reduced * shape.root_parameters,
        kept_bytes=width.weights * shape.ffn_hidden * shape.hidden,
        on_cpu=site.on_cpu,
    )


def hop2_bytes(entry: Entry, shape: ModelShape, precision: Precision, site: Site) -> float:
    """The part of it that is hop 2 at the boundary."""
    grid = grid_of(entry, nodes=site.nodes, devices_per_node=site.ranks_per_node)
    return traffic.hop2(grid, WIDTHS[precision].reduced * shape.parameters)


def held_bytes(entry: Entry, shape: ModelShape, precision: Precision, site: Site) -> float:
    """Bytes that a device holds from one micro-step to the next, or over the whole of one: model states, and gathered
    weights that are kept. What is gathered for one block at a time is about the same for all and is left out."""
    width, parameters = WIDTHS[precision], shape.parameters
    states = width.states * parameters / entry.partition_size
    kept = width.weights * parameters if parameters < DEEPSPEED_KEEPS_BELOW else 0.0
    match entry.strategy:
        case "zero2":
            return states + width.weights * parameters
        case "deepspeed-zero3" if not entry.second_gather:
            return states + kept
        case "deepspeed-hpz":  # and a second copy of the weights, spread over a node
            return states + kept + width.weights * parameters / site.ranks_per_node
    return states


def unfit(entry: Entry, shape: ModelShape, precision: Precision, site: Site, *, device_bytes: float | None) -> str:
    """Why an entry is not compared with this model; "" where it is.

    device_bytes  that a device has for it; None on CPU, where ranks share the free memory of their machine
    """
    if entry.strategy == "deepspeed-zero3" and not entry.second_gather and shape.parameters >= DEEPSPEED_KEEPS_BELOW:
        return "it keeps a part of a model of this size for the backward pass, and no formula says which"
    needed = held_bytes(entry, shape, precision, site)
    if entry.strategy.startswith("deepspeed-"):  # every rank makes the whole model in fp32 before it shards it
        needed = max(needed, 4.0 * shape.parameters)
    if device_bytes is not None and needed > device_bytes:
        return f"it needs {needed / 1e9:.1f} GB of a device that has {device_bytes / 1e9:.1f}"
    if site.on_cpu and (all_need := _on_cpu_bytes(needed, site)) > site.free_memory_bytes:
        return f"all ranks need about {all_need / 1e9:.0f} GB, and {site.free_memory_bytes / 1e9:.0f} GB are free"
    return ""


def together(
    entries: Sequence[Entry], shape: ModelShape, precision: Precision, site: Site, *, device_bytes: float
) -> bool:
    """Whether all entries fit into memory at once, so that they can take turns step by step."""
    held = sum(held_bytes(entry, shape, precision, site) for entry in entries)
    if not site.on_cpu:
        return held < device_bytes / 2
    return _on_cpu_bytes(held, site) < site.free_memory_bytes


def _on_cpu_bytes(held: float, site: Site) -> float:
    """What the ranks that share a machine's memory take when each of them holds so much."""
    ranks = site.world_size if site.emulated else site.ranks_per_node
    return ranks * (_RANK_BYTES + _OVER_HELD * held)
