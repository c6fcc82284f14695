"""Blocks that take as long as on another machine: what they compute is real, and they wait for the rest of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from mics.errors import RunRefusedError


def emulate(blocks: Iterable[nn.Module], seconds: float) -> None:
    """Let one forward and backward pass through all `blocks` take `seconds`, in place; 1/3 of it is the forward pass.

    A pass that computes for longer does not wait, so a slow machine adds nothing. The time of a block's backward pass,
    what it computes again included, runs from the gradient of its output to that of its input: FSDP2 waits for the
    gather before and sums gradients after it. DeepSpeed gathers inside of a block, and the waits for that count as
    computation here, in its favour. Call it after `mics.recompute.prepare_blocks`; on CPU only: a GPU's host does not
    know when a block computes.
    """
    blocks = list(blocks)
    for block in blocks:
        share = seconds / len(blocks)
        block.forward = _held(block.forward, forward_seconds=share / 3, backward_seconds=2 * share / 3)


def _held(forward: Callable[..., Any], *, forward_seconds: float, backward_seconds: float) -> Callable[..., Tensor]:
    def held(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        ends_at = time.perf_counter() + forward_seconds
        output = forward(x, *arguments, **named)
        if not isinstance(output, Tensor):
            raise RunRefusedError(
                f"emulated computation needs blocks that return a tensor, not {type(output).__name__}"
            )
        wait_until(ends_at)
        if x.requires_grad and output.requires_grad:
            backward_ends_at = 0.0

            def begin(_: Tensor) -> None:
                nonlocal backward_ends_at
                backward_ends_at = time.perf_counter() + backward_seconds

            output.register_hook(begin)  # type: ignore[no-untyped-call]  # torch
            x.register_hook(lambda _: wait_until(backward_ends_at))  # type: ignore[no-untyped-call]
            # FSDP2 hangs its wait for the gather on what is returned here: another tensor, whose hooks run before.
            output = output.view_as(output)
        return output

    return held


def wait_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` is there; not at all where it is past."""
    time.sleep(max(0.0, moment - time.perf_counter()))
