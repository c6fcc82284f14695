"""Memory of one device at the peak of an optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mics.config import Checkpointing, Precision
from mics.shapes import ModelShape
from mics.strategies import Reshard

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
    "fp16": Widths(states=16, weights=2, reduced=4, activations=2),
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
    checkpointing: Checkpointing = "none",
    reshard: Reshard = True,
    loss_chunk: int = 0,
    flash: bool = True,
    dropout: bool = False,
) -> Memory:
    """Predicted bytes on one device at the peak. The defaults are the bundled trainer's.

    P, P_b, P_r parameters in all, of one block, of the root; L blocks; T = micro_batch * sequence tokens; h hidden, f
    feed-forward, c keys (as many as values), a heads, V vocabulary; w, q, e bytes of a gathered weight, a reduced
    gradient, an activation.

    states       16 P / p = (4 master + 8 Adam moments + 4 gradient) P / p; in fp32 the master is the weight itself.
                 Hop 1's partial sum is the storage of the gradient (torch 2.13, `foreach_reduce`) and adds nothing.
    working set  while a block runs backward: (3 w + q) P_b = the block, the next block's gather, the block's gradients,
                 the reduce-scatter input of the block before (one lives: `reduce_scatter_max_input_buffers`). The copy
                 into that input is made even when w = q, so fp32 needs 16 P_b, bf16 10 P_b. At p = 1 nothing is
                 gathered, yet FSDP2 copies the block in use (`wait_for_unshard`): (2 w + q) P_b. Besides, 2 w P_r: the
                 root stays gathered, and the gradient of a tied head waits for that of the embedding.
                 While the loss runs, w P_r; when the root's own gradients are reduced, (2 w + q) P_r, or 4 w P_r where
                 a tied head's gradient is added to that of the embedding into a third.
                 Where blocks stay gathered (reshard False, or "step"), w L P_b in place of the block and the next one;
                 where k devices share a copy, w L P_b / k besides.
    activations  each block keeps e T (6 h + 2 c + 2 f): the inputs of the two norms, of QKV, of the projection and of
                 the first linear layer, Q, K and V; input and output of GELU. With f = 4 h and 16 bit that is 32 T h,
                 34 T h with the masks of dropout (Korthikanti et al., arXiv 2205.05198, section 4.1). Without flash
                 attention also its scores, e a sequence T, with dropout (2 e + 1) a sequence T.
                 Family llama: 4 f in place of 2 f (what SiLU is taken of, both factors, their product), and 2 h + c
                 more: Q and K once more after their rotation, and the output of the attention before its heads are
                 put together. On a CPU RMSNorm keeps its input and its result in fp32 at least; on a GPU it is fused.
                 Full checkpointing keeps a block's input, e T h; selective also the outputs of its matrix products and
                 of the attention, together e T (5 h + 2 c + f), with a gate 2 f. The rest of one block lives while it
                 is computed again.
                 The gradients that flow through a block, e T (h + f), with a gate 2 f, live when the block's own
                 gradients hardly do, so the larger of the two is counted.
    loss         3 T V max(4, e): the log-softmax, its gradient, and the one that is made from both, in fp32 at least;
                 with chunks for their tokens only, beside the gradient of the head, w V h. Besides
                 e T 2 h around the last norm, e T 5 h with the head of an encoder.
    overhead     on a GPU 6 % fragmentation and 2.5 GB, both assumptions and not measured; on a CPU none: the
                 interpreter, torch and the buffers of its libraries are not counted.

    The peak is the largest of three moments, a block's backward, the loss and the end, and the parts are those of that
    moment. The optimizer step stays below (AdamW fused). Compared on CPU with the allocated bytes of an FSDP2 loop
    (torch 2.13, gloo; tests/planner/step_memory.py): -4 to +6 %, figures in tests/planner/test_memory.py.
    """
    width = WIDTHS[precision]
    w, q, e = width.weights, width.reduced, width.activations
    tokens = micro_batch * sequence
    chunk = min(tokens, loss_chunk) if loss_chunk else tokens
    hidden, inner = shape.hidden, (2 if shape.gated else 1) * shape.ffn_hidden

    states = width.states * shape.parameters / partition_size
    between, in_use = _gathered_parameters(shape, partition_size, reshard)
    gradients, flowing = (w + q) * shape.block_parameters, 0.0
    first_gradient, flow = w * hidden * shape.ffn_hidden, e * tokens * (hidden + inner)
    if first_gradient + flow > gradients:
        gradients, flowing = first_gradient, flow
    block_working_set = w * (between + in_use + 2 * shape.root_parameters) + gradients
    head_gradient = w * shape.vocabulary * hidden if chunk < tokens else 0
    loss_working_set = w * (between + shape.root_parameters) + head_gradient

    one_block = _block_activations(shape, tokens, sequence, e, device=device, flash=flash, dropout=dropout)
    kept_of_block = {
        "none": one_block,
        "selective": e * tokens * (5 * hidden + 2 * shape.kv_hidden + inner),
        "full": e * tokens * hidden,
    }[checkpointing]
    kept = shape.layers * kept_of_block
    again = {"none": 0.0, "selective": one_block - kept_of_block, "full": one_block}[checkpointing]
    loss = 3 * max(4, e) * chunk * shape.vocabulary + e * tokens * hidden * (5 if shape.masked else 2)

    # working set, activations, loss
    in_block = (block_working_set, kept + again + flowing, 0.0)
    in_loss = (loss_working_set, float(kept), float(loss))
    at_end = (max(2 * w + q, 4 * w if shape.tied else 0) * shape.root_parameters, 0.0, 0.0)
    parts = (states, *max(in_block, in_loss, at_end, key=sum))
    overhead = 0.0 if device == "cpu" else FRAGMENTATION * sum(parts) + GPU_RESERVE_BYTES
    return Memory(*parts, overhead=overhead)


def _gathered_parameters(shape: ModelShape, partition_size: int, reshard: Reshard) -> tuple[float, float]:
    """Of the blocks: those that stay from forward to backward, and those that a block's backward gathers besides."""
    every = shape.layers * shape.block_parameters
    if reshard is False or reshard == "step":
        return every, 0
    between = 0 if reshard is True else every / reshard
    return between, (2 if partition_size > 1 else 1) * shape.block_parameters


def _block_activations(
    shape: ModelShape, tokens: int, sequence: int, e: int, *, device: str, flash: bool, dropout: bool
) -> float:
    """Bytes that one block keeps without checkpointing."""
    h, c, f = shape.hidden, shape.kv_hidden, shape.ffn_hidden
    linear = e * tokens * (6 * h + 2 * c + 2 * f)
    if shape.family == "llama":
        linear += e * tokens * (2 * f + 2 * h + c)
        linear += 2 * tokens * h * (2 * max(4, e) - e) if device == "cpu" else 0
    masks = 2 * tokens * h if dropout else 0
    scores = 0 if flash else (2 * e + 1 if dropout else e) * shape.heads * sequence * tokens
    return float(linear + masks + scores)
