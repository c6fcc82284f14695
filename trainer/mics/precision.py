"""Precision by name: which dtype the weights, the gathers and the reductions have, and the loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mics.config import Precision

FIRST_SCALE = 2.0**16
GROW_AFTER = 2000  # steps in a row without overflow


@dataclass(frozen=True)
class Dtypes:
    """
    master  of the sharded weights and the optimizer
    gather  of the gathered weights and the computation
    reduce  of the gradient sums of both hops
    """

    master: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype


DTYPES: dict[Precision, Dtypes] = {
    "fp32": Dtypes(torch.float32, torch.float32, torch.float32),
    "bf16": Dtypes(torch.float32, torch.bfloat16, torch.float32),
    "fp16": Dtypes(torch.float32, torch.float16, torch.float32),
    "fp64": Dtypes(torch.float64, torch.float64, torch.float64),
}


class LossScale:
    """The factor on the loss that keeps small fp16 gradients above zero, on the device: reading it would stop the GPU.

    It halves after a step that overflowed and doubles after GROW_AFTER steps that did not (Micikevicius et al., Mixed
    Precision Training, arXiv 1710.03740, section 3.2). For other precisions it is 1 and stays so.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._dynamic = precision == "fp16"
        self.value = torch.tensor(FIRST_SCALE if self._dynamic else 1.0, device=device)
        self._clean_steps = torch.zeros((), device=device)

    def update(self, overflowed: Tensor) -> None:
        """overflowed  1.0 where the step's gradients were not finite, else 0.0; a scalar on the device"""
        if not self._dynamic:
            return
        clean = (self._clean_steps + 1) * (1 - overflowed)
        grown = clean >= GROW_AFTER
        self.value *= torch.where(overflowed > 0, 0.5, torch.where(grown, 2.0, 1.0))
        self.value.clamp_(min=1.0)
        self._clean_steps = torch.where(grown, 0.0, clean)

    def state_dict(self) -> dict[str, Tensor]:
        """Empty where the scale is always 1: a run in fp16 that goes on from there starts with its own."""
        return {"value": self.value, "clean_steps": self._clean_steps} if self._dynamic else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self._dynamic:
            self.value.copy_(state["value"])
            self._clean_steps = state["clean_steps"].clone().to(self.value.device)
