"""AdamW, its schedules, and a step that can be left out without the host knowing."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.optim import AdamW

from mics.config import Schedule

BETAS = (0.9, 0.95)
FLOOR = 0.1  # both schedules end at this share of the peak


def learning_rate(
    step: int, *, peak: float, warmup: int, steps: int, schedule: Schedule = "cosine", decay: int = 0
) -> float:
    """The learning rate of optimizer step `step` (from 0) of `steps`. Pure.

    Linear warm-up that reaches the peak at its last step; then, so that the run's last step has peak / 10:
    cosine  a cosine (Loshchilov and Hutter, SGDR, arXiv 1608.03983)
    wsd     the peak, and a straight line in the last `decay` steps, 0 = a tenth of all (Hu et al., MiniCPM, arXiv
            2404.06395, section 4). A warm-up that reaches into them shortens them.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    fall = max(1, steps - warmup)
    if schedule == "wsd":
        fall = min(fall, decay or max(1, steps // 10))
    progress = min(1.0, max(0.0, (step + 1 - (steps - fall)) / fall))
    share = 1 - progress if schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (FLOOR + (1 - FLOOR) * share)


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> AdamW:
    """AdamW over the parameters that train. Matrices decay, norms and biases do not.

    Fused: the plain form needs about 4 bytes per local parameter more at the step.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=BETAS, fused=True)


def set_learning_rate(optimizer: AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_step(optimizer: AdamW, found_inf: Tensor) -> None:
    """One step; where `found_inf` is 1.0, weights, moments and the optimizer's count of steps stay as they are.

    The fused kernel decides on the device, so the host reads nothing and does not wait.

    found_inf  fp32 scalar on the device of the parameters: 1.0 where a gradient is not finite, else 0.0; the same on
               all ranks
    """
    # The two attributes are the interface that torch.amp.GradScaler uses for fused optimizers.
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
