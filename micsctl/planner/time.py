"""Seconds of one optimizer step, predicted. A first form, with weak constants: docs/time-model.md. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from mics import traffic
from mics.config import Checkpointing, Precision
from mics.shapes import ModelShape
from mics.strategies import Reshard
from mics.topology import RankGrid

from micsctl.planner.memory import WIDTHS
from micsctl.planner.speeds import Speeds

HBM_SHARE = 0.8  # of the memory's rate, in streaming operators; assumption
OPTIMIZER_BYTES = (
    34  # that fused AdamW reads and writes per parameter: master, moments, gradient, 16-bit copy, the norm
)
OPTIMIZER_SECONDS = 3e-3  # of launching it; assumption


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step, all micro-steps together.

    compute       forward and backward passes, and what is computed again
    gather, hop1, hop2  what each stage would last by itself
    exposed       what of these three is not hidden under compute
    range_share   the step may be off by this share, either way
    """

    compute_seconds: float
    gather_seconds: float
    hop1_seconds: float
    hop2_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    range_share: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds + self.optimizer_seconds

    @property
    def binds(self) -> Literal["compute", "gather", "hop1", "hop2"]:
        """What to make faster first: compute, or where communication lasts longer, its longest stage."""
        if self.compute_seconds >= self.gather_seconds + self.hop1_seconds + self.hop2_seconds:
            return "compute"
        if self.hop2_seconds >= max(self.gather_seconds, self.hop1_seconds):
            return "hop2"
        return "gather" if self.gather_seconds >= self.hop1_seconds else "hop1"


@dataclass(frozen=True)
class Batch:
    """Sequences per device and micro-step, their length in tokens, sequences per optimizer step. The defaults are those
    of the MiCS paper's BERT runs."""

    micro_batch: int = 8
    sequence: int = 512
    global_batch: int = 8192

    def micro_steps(self, world_size: int) -> int:
        """Of one optimizer step: the global batch over what all devices take at a time, rounded up."""
        return math.ceil(self.global_batch / (world_size * self.micro_batch))


def predict(
    shape: ModelShape,
    grid: RankGrid,
    *,
    speeds: Speeds,
    micro_batch: int,
    sequence: int,
    micro_steps: int,
    precision: Precision,
    checkpointing: Checkpointing = "full",
    reshard: Reshard = True,
    reduced_bytes: int | None = None,
) -> StepTime:
    """Predicted seconds of one optimizer step of the MiCS schedule, of ZeRO-3 (p = n), of ZeRO-2 (p = n, reshard
    "step"), of DDP (p = 1), as `mics.traffic.per_step` has their bytes.

    reduced_bytes  per gradient while it is reduced; None: as the trainer does it, 4 in 16 bit and fp32

    In each pass a block's compute c stands against its own communication m and takes max(c, m) + (1 - omega) min(c, m).
    m is the gather in a forward pass, gather and reduce-scatter in a backward pass; in the last one hop 2 besides,
    beside them where these stay inside the node, after them where they do not. The root's communication is not hidden.
    """
    width = WIDTHS[precision]
    reduced = width.reduced if reduced_bytes is None else reduced_bytes
    layers, s = shape.layers, micro_steps
    forward, again, head = _compute(shape, speeds, micro_batch, sequence, precision, checkpointing)
    backward = 2 * forward + again

    gather, hop1, hop2 = _stages(grid, speeds, width.weights, reduced, shape.block_parameters)
    root_gather, root_hop1, root_hop2 = _stages(grid, speeds, width.weights, reduced, shape.root_parameters)
    later = 0.0 if reshard == "step" else gather  # in the forward passes after the first
    again_gather = _second_gather(grid, speeds, width.weights * shape.block_parameters, gather, reshard)
    inside = again_gather + hop1
    beside = grid.partition_size <= grid.devices_per_node < grid.world_size
    last = max(inside, hop2) if beside else inside + hop2

    exposed = layers * (
        _exposed(forward, gather, speeds)
        + (s - 1) * (_exposed(forward, later, speeds) + _exposed(backward, inside, speeds))
        + _exposed(backward, last, speeds)
    )
    root_gathers = root_gather * (1 if reshard == "step" else s)
    return StepTime(
        compute_seconds=s * (layers * (forward + backward) + head),
        gather_seconds=layers * (gather + (s - 1) * later + s * again_gather) + root_gathers,
        hop1_seconds=s * (layers * hop1 + root_hop1),
        hop2_seconds=layers * hop2 + root_hop2,
        exposed_seconds=exposed + root_gathers + s * root_hop1 + root_hop2,
        optimizer_seconds=OPTIMIZER_BYTES * shape.parameters / grid.partition_size / _streaming(speeds)
        + OPTIMIZER_SECONDS,
        range_share=speeds.range_share,
    )


def _exposed(compute: float, communication: float, speeds: Speeds) -> float:
    return max(0.0, communication - compute) + (1 - speeds.omega) * min(compute, communication)


def _streaming(speeds: Speeds) -> float:
    return HBM_SHARE * speeds.hbm_bytes_per_second


def _compute(
    shape: ModelShape,
    speeds: Speeds,
    micro_batch: int,
    sequence: int,
    precision: Precision,
    checkpointing: Checkpointing,
) -> tuple[float, float, float]:
    """Seconds of a block's forward pass, of computing it again, and of the head's forward and backward pass.

    Matrix products run at e_max T/(T + 256) h/(h + 128) of the peak for T tokens and hidden size h. Elementwise
    operators touch tau times what a block keeps, which is 34 T h bytes in 16 bit with f = 4 h (Korthikanti et al.,
    arXiv 2205.05198, section 4.1).
    """
    tokens, hidden = micro_batch * sequence, shape.hidden
    peak = {"fp32": speeds.peak_flops_fp32, "fp64": speeds.peak_flops_fp32 / 2}.get(precision, speeds.peak_flops)
    flops = peak * speeds.e_max * tokens / (tokens + 256) * hidden / (hidden + 128)
    block_flops = replace(shape, layers=2).flops_per_token(sequence) - replace(shape, layers=1).flops_per_token(
        sequence
    )
    head_flops = shape.flops_per_token(sequence) - shape.layers * block_flops

    kept = 7 * hidden + 2 * shape.kv_hidden + (4 if shape.gated else 2) * shape.ffn_hidden
    elementwise = speeds.tau * WIDTHS[precision].activations * tokens * kept / _streaming(speeds)
    forward = tokens * block_flops / flops + elementwise
    again = {"none": 0.0, "selective": elementwise, "full": forward}[checkpointing]
    return forward, again, 3 * tokens * head_flops / flops


def _stages(
    grid: RankGrid, speeds: Speeds, weight_bytes: int, reduced_bytes: int, parameters: int
) -> tuple[float, float, float]:
    """Seconds of one gather, one hop 1 and one hop 2 of so many parameters."""
    pieces = speeds.collectives_per_block
    gather, hop1 = (pieces * _one_pass(grid, speeds, w * parameters / pieces) for w in (weight_bytes, reduced_bytes))
    return gather, hop1, _hop2(grid, speeds, reduced_bytes * parameters)


def _second_gather(grid: RankGrid, speeds: Speeds, message: float, gather: float, reshard: Reshard) -> float:
    """Seconds of a block's gather for its backward pass."""
    if isinstance(reshard, bool):
        return gather if reshard else 0.0
    return 0.0 if reshard == "step" else _inside(speeds, reshard, message)


def _one_pass(grid: RankGrid, speeds: Speeds, message: float) -> float:
    """Seconds of one gather or reduce-scatter of `message` bytes over every partition group."""
    p, nodes = grid.partition_size, grid.nodes_per_partition
    if nodes == 1:
        return _inside(speeds, p, message)
    sent = traffic.one_pass(grid, message)
    if not grid.hierarchical:
        return max(_across(speeds, nodes, p, sent), _inside(speeds, p, message))
    return _across(replace(speeds, eta=speeds.eta * speeds.hier_eff), nodes, nodes, sent) + _inside(
        speeds, grid.devices_inside, message
    )


def _hop2(grid: RankGrid, speeds: Speeds, message: float) -> float:
    """Seconds of the all-reduce of `message` bytes of gradients over the replication groups: two rings' worth."""
    r, nodes = grid.replicas, grid.world_size // grid.devices_per_node
    if r == 1:
        return 0.0
    if nodes == 1:
        return 2 * _inside(speeds, r, message / grid.partition_size)
    sent = traffic.hop2(grid, message)
    return _across(speeds, min(r, nodes), r, sent) + _latency(speeds, min(r, nodes), r)


def _inside(speeds: Speeds, ranks: int, message: float) -> float:
    """Seconds of a ring inside a node."""
    return (ranks - 1) * speeds.inside_latency_seconds + (ranks - 1) / ranks * message / speeds.inside_bytes_per_second


def _across(speeds: Speeds, nodes: int, ranks: int, sent: float) -> float:
    """Seconds of rings over so many nodes and ranks in which every node sends so many bytes.

    A small message pays the latency, a large one the ramp besides: NCCL's curves bend so.
    """
    rate = speeds.link_bytes_per_second * speeds.eta * math.pow(nodes / 2, -speeds.gamma)
    ramp = speeds.ramp_seconds * sent / (sent + speeds.ramp_bytes)
    return _latency(speeds, nodes, ranks) + ramp + sent / rate


def _latency(speeds: Speeds, nodes: int, ranks: int) -> float:
    return nodes * speeds.net_latency_seconds + (ranks - nodes) * speeds.inside_latency_seconds


def compute_per_hop2(
    shape: ModelShape,
    speeds: Speeds,
    nodes: int,
    devices_per_node: int,
    *,
    partition_size: int,
    batch: Batch | None = None,
    precision: Precision = "fp16",
    checkpointing: Checkpointing = "full",
    reduced_bytes: int | None = None,
) -> float:
    """Seconds of compute of one optimizer step over the seconds of its hop 2.

    `batch` None: the paper's, 8192 sequences whatever the number of nodes. `reduced_bytes`: see `predict`. Infinite
    where there is no hop 2, as on one node with p = k. Raises ValueError for a p that the nodes cannot have.
    """
    batch, n = batch or Batch(), nodes * devices_per_node
    step = predict(
        shape,
        RankGrid(n, devices_per_node, partition_size, hierarchical=partition_size > devices_per_node > 1),
        speeds=speeds,
        micro_batch=batch.micro_batch,
        sequence=batch.sequence,
        micro_steps=batch.micro_steps(n),
        precision=precision,
        checkpointing=checkpointing,
        reduced_bytes=reduced_bytes,
    )
    return step.compute_seconds / step.hop2_seconds if step.hop2_seconds else math.inf
