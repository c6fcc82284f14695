"""Precision by name: which dtype the weights, the gathers and the reductions have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics.config import Precision


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
    "fp64": Dtypes(torch.float64, torch.float64, torch.float64),
}
