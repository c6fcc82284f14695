"""Settings of the process: when Python collects garbage, and whether every run gives the same bits."""

from __future__ import annotations

import ctypes
import gc
import os

import torch

COLLECT_EVERY = 50  # steps


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


def give_back_memory() -> None:
    """Collect garbage, and give free memory back to the machine, where the C library is glibc.

    It keeps what a thread has freed for that thread alone, so lanes of one model would hold what another one needs.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def deterministic() -> None:
    """The same bits from the same run on the same machines. Call it before the first work on the GPU.

    torch then chooses slower kernels where the fast ones add in any order, and raises RuntimeError for those that have
    no other. Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
