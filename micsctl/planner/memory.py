"""Memory of one device at the peak of an optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mics.config import Precision
from mics.shapes import ModelShape

from micsctl.planner.model import Memory

FRAGMENTATION = 0.06  # assumption: share of the allocated bytes that a caching GPU allocator cannot use
GPU_RESERVE_BYTES = 2.5e9  # assumption: CUDA context, NCCL buffers, cuBLAS workspace


@dataclass(frozen=True)
class Widths:
    """Bytes per number."""

    states: int  # per parameter: master weight, the two Adam moments, the gradient shard
    weights: int  # gathered weights and their gradients
    reduced: int  # gradients while they are reduced
    activations: int


WIDTHS: Mapping[Precision, Widths] = {
    "bf16": Widths(states=16, weights=2, reduced=4, activations=2),
    "fp32": Widths(states=16, weights=4, reduced=4, activations=4),
    "fp64": Widths(states=32, weights=8, reduced=8, activations=8),
}


def estimate(
    shape: ModelShape,
    *,
    partition_size: int,
    micro_batch: int,
    sequence: int,
    precision: Precision,
    device: str,
    checkpointing: Literal["none", "full"] = "none",
    flash: bool = True,
    dropout: bool = False,
) -> Memory:
    """Predicted bytes on one device at the peak. The defaults are the bundled trainer's.

    P, P_b, P_r parameters in all, of one block, of the root; T = micro_batch * sequence tokens; h hidden, f feed-forward,
    a heads, V vocabulary; w, q, e bytes of a gathered weight, a reduced gradient, an activation.

    states       (4 master + 8 Adam moments + 4 gradient) P / p. In fp32 the master is the weight itself. The partial sum
                 of hop 1 is the storage of the gradient (torch 2.13, `foreach_reduce`: `partial_reduce_output`), so it
                 adds nothing.
    working set  while a block runs backward: (3 w + q) P_b = the block, the next block's gather, the block's gradients,
                 the reduce-scatter input of the block before (at most one lives: `reduce_scatter_max_input_buffers`).
                 The copy into that input is made even when w = q, so fp32 needs 16 P_b and bf16 10 P_b. The root stays
                 gathered, w P_r, and with a tied head its gradient is held until the embedding's own backward: w P_r
                 more. At p = 1 FSDP2 gathers nothing but still copies the block in use, so only the next block's gather
                 falls away: (2 w + q) P_b. While the loss runs: (2 w + q) P_r.
    activations  kept by every block, e T (8 h + 2 f) without dropout and with flash attention: inputs of the two norms,
                 of QKV, of the projection and of the first linear layer, Q, K, V, and f each for GELU's input and
                 output; at f = 4 h and 16 bit 32 T h, and 34 T h with dropout's masks (Korthikanti et al.,
                 arXiv 2205.05198, equation 1). Without flash attention also the scores, e a sequence T, which dropout
                 raises to (2 e + 1) a sequence T. With full checkpointing a block keeps its input only, e T h, and the
                 rest lives in the one block that is computed again.
    loss         T V (e + 2 max(4, e)): logits, their fp32 log-softmax, its gradient.
    overhead     on a GPU 6 % fragmentation and 2.5 GB, both assumptions and not measured; none on a CPU, where the
                 interpreter and torch themselves are not counted.

    The peak is the larger of two moments, a block's backward and the loss; the parts are those of that moment. The
    optimizer step stays below both when AdamW is fused.
    """
    width = WIDTHS[precision]
    w, q, e = width.weights, width.reduced, width.activations
    tokens = micro_batch * sequence

    states = width.states * shape.parameters / partition_size
    next_gather = w if partition_size > 1 else 0
    root_in_block = 2 * w * shape.root_parameters
    block_working_set = root_in_block + (2 * w + next_gather + q) * shape.block_parameters
    loss_working_set = (2 * w + q) * shape.root_parameters

    one_block = _block_activations(shape, tokens, sequence, e, flash=flash, dropout=dropout)
    kept = shape.layers * (one_block if checkpointing == "none" else e * tokens * shape.hidden)
    again = 0.0 if checkpointing == "none" else one_block
    loss = tokens * shape.vocabulary * (e + 2 * max(4, e))

    if block_working_set + again >= loss_working_set + loss:
        parts = (states, block_working_set, kept + again, 0.0)
    else:
        parts = (states, loss_working_set, kept, float(loss))
    overhead = 0.0 if device == "cpu" else FRAGMENTATION * sum(parts) + GPU_RESERVE_BYTES
    return Memory(*parts, overhead=overhead)


def _block_activations(shape: ModelShape, tokens: int, sequence: int, e: int, *, flash: bool, dropout: bool) -> float:
    linear = e * tokens * (8 * shape.hidden + 2 * shape.ffn_hidden)
    masks = 2 * tokens * shape.hidden if dropout else 0
    scores = 0 if flash else (2 * e + 1 if dropout else e) * shape.heads * sequence * tokens
    return float(linear + masks + scores)
