"""The loss on text that is not trained on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mics.job import Job
from mics.models.built import IGNORED
from mics.sharding import abort


def validation_loss(job: Job) -> float:
    """Mean over the valid targets of the validation sequences, nats. Collective over all ranks.

    It depends on neither n, p nor the micro-batch. Call it between steps: it forgets an accumulation in progress.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=job.device)  # loss, targets
    job.model.eval()
    with torch.no_grad():
        for inputs, targets in job.held_out():
            on_device = targets.to(job.device, non_blocking=True)
            sums[0] += job.built.summed_loss(job.model, inputs.to(job.device, non_blocking=True), on_device)
            sums[1] += (on_device != IGNORED).sum()
    job.model.train()
    abort(job.model)  # a forward pass without its backward leaves weights gathered
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return float(total / count)
