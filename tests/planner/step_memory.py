"""The bytes that a training step allocates on each rank. Run by tests/mics/rank_launcher.py, in a process per rank."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
import torch.distributed as dist
from mics.config import Checkpointing, Precision
from mics.init import materialise
from mics.models.transformer import build_transformer, summed_loss
from mics.optim import adamw
from mics.precision import DTYPES
from mics.recompute import prepare_blocks
from mics.shapes import ModelShape
from mics.sharding import apply, boundary, connect
from mics.strategies import Reshard
from mics.topology import RankGrid
from torch.utils._python_dispatch import TorchDispatchMode


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    ]


_mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
_mallinfo2.restype = MallInfo


def allocated_bytes() -> int:
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Peak(TorchDispatchMode):
    """The most that was allocated after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, allocated_bytes())
        return result


def peak_bytes(cells: list[dict[str, Any]]) -> list[int]:
    """The largest of the ranks for each cell, see `_peak_bytes`."""
    # twice, because the first time matrix libraries make buffers that they keep
    found = torch.tensor([[_peak_bytes(**cell, steps=steps) for steps in (2, 4)][1] for cell in cells])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def _peak_bytes(
    shape: ModelShape,
    p: int,
    micro_batch: int,
    sequence: int,
    precision: Precision,
    *,
    steps: int,
    checkpointing: Checkpointing = "none",
    reshard: Reshard = True,
    loss_chunk: int = 0,
) -> int:
    """Allocated at the peak of a step of two micro-steps, less what the process held before the model.

    The first step makes the optimizer's states; of the others the least counts: on a busy machine a collective's
    thread that is late frees its buffer late.
    """
    n = dist.get_world_size()
    gc.collect()
    before = allocated_bytes()
    dtypes = DTYPES[precision]
    model = build_transformer(shape, dtypes.master)
    prepare_blocks(model.blocks, checkpointing=checkpointing)
    connection = connect(RankGrid(n, n, p))
    apply(
        model,
        connection,
        blocks=model.blocks,
        gather_dtype=dtypes.gather,
        reduce_dtype=dtypes.reduce,
        reshard=reshard,
    )
    materialise(model, model.fill, seed=0, device=torch.device("cpu"))
    optimizer = adamw(model, lr=1e-3, weight_decay=0.1)
    ids = torch.randint(0, shape.vocabulary, (micro_batch, sequence + 1))
    peaks = [Peak() for _ in range(steps)]
    for peak in peaks:
        with peak:
            for micro in range(2):
                with boundary(model, last=micro == 1):
                    loss = summed_loss(model, ids[:, :-1], ids[:, 1:], loss_chunk=loss_chunk) / ids.numel()
                    loss.backward()  # type: ignore[no-untyped-call]  # torch
                    del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return min(peak.bytes for peak in peaks[1:]) - before
