"""FSDP2 as it comes: what PyTorch's tutorial and torchtitan do with it, through its public interface alone.

One group for each block and one for the rest, natural rank order, the backend's own collectives (a reduce-scatter of
gloo is an all-reduce inside), gradients averaged over the ranks, `torch.nn.utils.clip_grad_norm_`. Sources:
https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html and `torchtitan/distributed/fsdp.py`.

`fsdp2-hsdp` shards over p devices in a (replicate, shard) mesh. torchtitan's loop sums over the replicas in every
micro-step: `hop2_every_micro_step: true`. With false, `set_requires_all_reduce` leaves that to the last one: FSDP2 can
do it, for those who know the call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics.bench.contender import Contender, Setting
from mics.entries import Entry
from mics.init import materialise
from mics.optim import adamw
from mics.precision import DTYPES


class Fsdp2(Contender):
    """Collective over all ranks, as all contenders."""

    def __init__(self, entry: Entry, setting: Setting) -> None:
        run, device, dtypes = setting.run, setting.device, DTYPES[setting.run.precision]
        self.built, self._world_size, self._max_norm = setting.build(), run.world_size, run.train.clip
        replicas = run.world_size // entry.partition_size
        if replicas > 1:
            shape, names = (replicas, entry.partition_size), ("dp_replicate", "dp_shard")
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        else:
            self._mesh = init_device_mesh(device.type, (run.world_size,))
        precision = MixedPrecisionPolicy(param_dtype=dtypes.gather, reduce_dtype=dtypes.reduce)
        for block in self.built.blocks:
            fully_shard(block, mesh=self._mesh, mp_policy=precision)
        self._model = self.built.model
        self._sharded = fully_shard(self._model, mesh=self._mesh, mp_policy=precision)
        self._all_reduces_every_micro_step = entry.hop2_every_micro_step
        materialise(self._model, self.built.fill, seed=run.train.seed, device=device)
        self._optimizer = adamw(self._model, lr=run.train.lr, weight_decay=run.train.weight_decay)

    def micro_step(self, inputs: Tensor, targets: Tensor, tokens: Tensor, *, last: bool) -> Tensor:
        if self._mesh.ndim > 1 and not self._all_reduces_every_micro_step:
            self._sharded.set_requires_all_reduce(last)
        loss = self.built.summed_loss(self._model, inputs, targets) / tokens
        (loss * self._world_size).backward()  # type: ignore[no-untyped-call]  # torch; it averages over the ranks
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        if self._mesh.ndim > 1:  # otherwise it is the world's own group
            dist.barrier()
            for name in self._mesh.mesh_dim_names or ():
                dist.destroy_process_group(self._mesh.get_group(name))
