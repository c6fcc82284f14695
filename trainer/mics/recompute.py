"""What a block does again in the backward pass, and torch.compile, block by block.

Both replace `block.forward`. A module around the block would rename its parameters; and FSDP2's hooks sit outside
`forward`, so the second forward pass runs on the weights that were gathered for the backward pass: it gathers nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mics.config import Checkpointing, Compile
from mics.errors import RunRefusedError

Forward = Callable[..., Any]

_aten = torch.ops.aten
# Dear to compute and small to keep. Everything else of a block is elementwise or a norm.
KEPT_OPERATIONS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def prepare_blocks(
    blocks: Iterable[nn.Module], *, checkpointing: Checkpointing = "none", compile: Compile = "none"
) -> None:
    """Make each block recompute its activations, then compile it, in place. Call it before `mics.apply`.

    checkpointing  "none"; "full" keeps only a block's inputs; "selective" also keeps the outputs of its matrix products
                   and of scaled_dot_product_attention
    compile        "none" or a backend of torch.compile. The checkpoint is inside the compiled function, so that the
                   compiler sees what is computed again
    """
    for block in blocks:
        if checkpointing != "none":
            block.forward = recomputed(block.forward, selective=checkpointing == "selective")
        if compile != "none":
            block.forward = torch.compile(block.forward, backend=compile)


def check_compiler(compile: Compile, environment: Mapping[str, str]) -> None:
    """Raises RunRefusedError where `compile` needs a compiler that this node does not have."""
    compiler = environment.get("CXX", "g++")  # as torch._inductor looks for it on Linux
    if compile == "inductor" and not shutil.which(compiler, path=environment.get("PATH")):
        raise RunRefusedError(f"train.compile: inductor needs a C++ compiler on every node, here is no {compiler}")


def recomputed(forward: Forward, *, selective: bool) -> Forward:
    """`forward`, computed again in the backward pass; the same dropout both times."""
    if not selective:
        return partial(checkpoint, forward, use_reentrant=False)
    kept = partial(create_selective_checkpoint_contexts, KEPT_OPERATIONS)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=kept)
