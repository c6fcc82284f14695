"""AdamW and its schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

BETAS = (0.9, 0.95)
FLOOR = 0.1  # the cosine ends at this share of the peak


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then a cosine from peak to peak / 10. Pure.

    The warm-up reaches the peak at its last step; the last step of the run has peak / 10.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup + 1) / max(1, steps - warmup))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> AdamW:
    """AdamW over the model's parameters. Matrices decay, norms and biases do not.

    Fused: the plain form needs about 4 bytes per local parameter more at the step.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=BETAS, fused=True)


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
