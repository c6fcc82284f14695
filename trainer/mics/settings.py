"""Settings of the process: when Python collects garbage, and whether every run gives the same bits."""

from __future__ import annotations

import ctypes
import gc
import os

import torch

COLLECT_EVERY = 50  # steps
_M_ARENA_MAX = -8  # malloc.h


def quiet_garbage() -> None:
    """Stop automatic garbage collection; call it when the model is built, and `collect` after each step.

    Otherwise every rank collects at a moment of its own, and all the others wait for it in the next collective. What
    exists now (torch, the model) is never looked through again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def collect(step: int) -> None:
    """Collect garbage every COLLECT_EVERY steps: all ranks at the same time."""
    if step % COLLECT_EVERY == 0:
        gc.collect()


def share_freed_memory() -> None:
    """Let all threads use what any of them has freed, where the C library is glibc. Call it before they begin.

    Otherwise each keeps its own (an arena), and with many models in a process the lanes of one hold what another needs.
    Source: mallopt(3), M_ARENA_MAX.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_ARENA_MAX, 1)


def deterministic() -> None:
    """The same bits from the same run on the same machines. Call it before the first work on the GPU.

    torch then chooses slower kernels where the fast ones add in any order, and raises RuntimeError for those that have
    no other. Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
