"""Bytes by formula: what an entry sends, and what it holds. Pure."""

from __future__ import annotations

from mics import traffic
from mics.config import Precision
from mics.entries import Entry, grid_of, traffic_bytes
from mics.shapes import ModelShape

from micsctl.bench.model import Place
from micsctl.planner.memory import WIDTHS


def sent_bytes(entry: Entry, shape: ModelShape, precision: Precision, place: Place) -> float:
    """Payload that leaves a node in an optimizer step."""
    width, blocks = WIDTHS[precision], shape.layers * shape.block_parameters
    reduced = width.weights if entry.strategy.startswith("deepspeed-") else width.reduced
    return traffic_bytes(
        entry,
        nodes=place.nodes,
        devices_per_node=place.ranks_per_node,
        block_bytes=width.weights * blocks,
        root_bytes=width.weights * shape.root_parameters,
        block_gradient_bytes=reduced * blocks,
        root_gradient_bytes=reduced * shape.root_parameters,
        kept_bytes=width.weights * shape.ffn_hidden * shape.hidden,
        on_cpu=place.on_cpu,
    )


def hop2_bytes(entry: Entry, shape: ModelShape, precision: Precision, place: Place) -> float:
    """The part of it that is hop 2 at the boundary."""
    grid = grid_of(entry, nodes=place.nodes, devices_per_node=place.ranks_per_node)
    return traffic.hop2(grid, WIDTHS[precision].reduced * shape.parameters)


def held_bytes(entry: Entry, shape: ModelShape, precision: Precision, place: Place) -> float:
    """Bytes that a device holds from one micro-step to the next, or over the whole of one: model states, and gathered
    weights that are kept. What is gathered for one block at a time is about the same for all and is left out."""
    width, parameters = WIDTHS[precision], shape.parameters
    states = width.states * parameters / entry.partition_size
    match entry.strategy:
        case "zero2":
            return states + width.weights * parameters
        case "deepspeed-zero3" if not entry.second_gather:  # keeps a small model's weights for the backward pass
            return states + width.weights * parameters
        case "deepspeed-hpz":  # a second copy of the weights, spread over a node
            return states + width.weights * parameters / place.ranks_per_node
    return states
