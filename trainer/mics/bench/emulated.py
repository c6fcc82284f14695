"""Blocks that take as long as on another machine: what they compute is real, and they wait for the rest of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from mics.errors import RunRefusedError


class Device:
    """The clock of an emulated device, restarted for every step.

    A GPU's host prepares blocks while earlier ones are computed; the device stands still where a collective is late, or
    the host. A rank here waits in place of a device, so its own work between blocks (Python, its turn on a crowded
    core) would add to every block. It is counted on a clock of its own instead, which runs ahead as a GPU's host does.
    Where nobody measures the waits for collectives, all that lies between blocks counts.
    """

    def __init__(self) -> None:
        self._waited: Callable[[], float] | None = None
        self._free_at = self._host_at = self._left_at = 0.0

    def restart(self, waited: Callable[[], float] | None) -> None:
        """A step begins. waited: seconds that the computation has stood still for collectives since the last call."""
        self._waited = waited
        self._free_at = self._host_at = self._left_at = time.perf_counter()
        if waited:
            waited()

    def ends_at(self, seconds: float) -> float:
        """When a pass of a block is over that begins now on the host and computes for so long."""
        begins_at = now = time.perf_counter()
        if self._waited:
            waited = self._waited()
            self._host_at += max(0.0, now - self._left_at - waited)
            begins_at = max(self._free_at + waited, self._host_at)
        self._free_at = begins_at + seconds
        return self._free_at

    def wait_until(self, moment: float) -> None:
        """Sleep until then, at the end of a pass; not at all where it is past."""
        time.sleep(max(0.0, moment - time.perf_counter()))
        self._left_at = time.perf_counter()


def emulate(blocks: Iterable[nn.Module], seconds: float, device: Device) -> None:
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
        block.forward = _held(block.forward, device, forward_seconds=share / 3, backward_seconds=2 * share / 3)


def _held(
    forward: Callable[..., Any], device: Device, *, forward_seconds: float, backward_seconds: float
) -> Callable[..., Tensor]:
    def held(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        ends_at = device.ends_at(forward_seconds)
        output = forward(x, *arguments, **named)
        if not isinstance(output, Tensor):
            raise RunRefusedError(
                f"emulated computation needs blocks that return a tensor, not {type(output).__name__}"
            )
        device.wait_until(ends_at)
        if x.requires_grad and output.requires_grad:
            backward_ends_at = 0.0

            def begin(_: Tensor) -> None:
                nonlocal backward_ends_at
                backward_ends_at = device.ends_at(backward_seconds)

            output.register_hook(begin)  # type: ignore[no-untyped-call]  # torch
            x.register_hook(lambda _: device.wait_until(backward_ends_at))  # type: ignore[no-untyped-call]
            # FSDP2 hangs its wait for the gather on what is returned here: another tensor, whose hooks run before.
            output = output.view_as(output)
        return output

    return held
