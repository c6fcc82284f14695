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

    P, P_b, P_r parameters in all, of one block, of the root; T = micro_batch * sequence tokens; h hidden, f
    feed-forward, a heads, V vocabulary; w, q, e bytes of a gathered weight, a reduced gradient, an activation.

    states       16 P / p = (4 master + 8 Adam moments + 4 gradient) P / p; in fp32 the master is the weight itself.
                 Hop 1's partial sum is the storage of the gradient (torch 2.13, `foreach_reduce`) and adds nothing.
    working set  while a block runs backward: (3 w + q) P_b = the block, the next block's gather, the block's gradients,
                 the reduce-scatter input of the block before (one lives: `reduce_scatter_max_input_buffers`). The copy
                 into that input is made even when w = q, so fp32 needs 16 P_b, bf16 10 P_b. At p = 1 nothing is
                 gathered, yet FSDP2 copies the block in use (`wait_for_unshard`): (2 w + q) P_b. Besides, 2 w P_r: the
                 root stays gathered, and the gradient of a tied head waits for that of the embedding.
                 While the loss runs: (2 w + q) P_r.
    activations  each block keeps e T (8 h + 2 f): the inputs of the two norms, of QKV, of the projection and of the
                 first linear layer, Q, K and V; input and output of GELU. With f = 4 h and 16 bit that is 32 T h, and
                 34 T h with the masks of dropout (Korthikanti et al., arXiv 2205.05198, section 4.1). Without flash
                 attention also its scores, e a sequence T, with dropout (2 e + 1) a sequence T. With full
                 checkpointing a block keeps its input, e T h, and the rest lives in the one block computed again.
    loss         T V (e + 2 max(4, e)): logits, their log-softmax, its gradient (these two in fp32 at least).
    overhead     on a GPU 6 % fragmentation and 2.5 GB, both assumptions and not measured; on a CPU none: the
                 interpreter and torch themselves are not counted.

    The peak is the larger of two moments, a block's backward and the loss, and the parts are those of that moment. The
    optimizer step stays below both (AdamW fused). Compared on CPU with the allocated bytes of an FSDP2 loop (torch
    2.13, gloo, fp32 and bf16, p = 1, 2, 4): -1 to +3 % for gpt-3m and gpt-17m, -2 to +6 % for gpt2-124m.
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
