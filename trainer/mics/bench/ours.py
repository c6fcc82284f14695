"""The strategies of `mics` as contenders, with a ring reduce-scatter or, on CPU, one of two others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mics.bench.contender import Contender, Setting
from mics.collectives import FlatReduceScatter, ReduceOp
from mics.entries import Entry, grid_of, reshard_of_entry
from mics.init import materialise
from mics.optim import adamw, optimizer_step
from mics.precision import DTYPES, LossScale
from mics.ranks import collective_timeout
from mics.sharding import apply, boundary, check_replicas, clip, connect, disconnect


class NativeReduceScatter(FlatReduceScatter):
    """The backend's own. gloo's is an all-reduce inside."""

    def _stages(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: ReduceOp) -> None:
        dist.reduce_scatter_single(output, input, op=op, group=group)


class DirectReduceScatter(FlatReduceScatter):
    """Each chunk straight to its owner, who adds them up."""

    def _stages(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: ReduceOp) -> None:
        received = torch.empty_like(input)
        dist.all_to_all_single(received, input, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output.view(-1))


REDUCE_SCATTERS = {"native": NativeReduceScatter, "direct": DirectReduceScatter}


class Ours(Contender):
    """Collective over all ranks, as all contenders."""

    def __init__(self, entry: Entry, setting: Setting) -> None:
        run, device, dtypes = setting.run, setting.device, DTYPES[setting.run.precision]
        grid = grid_of(entry, nodes=run.nodes, devices_per_node=run.devices_per_node)
        self._hop2_every_micro_step, self._max_norm = entry.hop2_every_micro_step, run.train.clip
        self.built = setting.build()
        self._connection = connect(grid, device=device.type, timeout=collective_timeout(run.train.limits))
        self.waited = self._connection.meter.take_exposed_seconds
        self._model = apply(
            self.built.model,
            self._connection,
            blocks=self.built.blocks,
            gather_dtype=dtypes.gather,
            reduce_dtype=dtypes.reduce,
            reshard=reshard_of_entry(entry),
        )
        other = REDUCE_SCATTERS.get(entry.reduce_scatter) if device.type == "cpu" else None
        if other:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(other(self._connection.meter))
        self._counts = other is None
        materialise(self._model, self.built.fill, seed=run.train.seed, device=device)
        check_replicas(self._model, self._connection)
        self._optimizer = adamw(self._model, lr=run.train.lr, weight_decay=run.train.weight_decay)
        self._scale = LossScale(run.precision, device)

    def micro_step(self, inputs: Tensor, targets: Tensor, tokens: Tensor, *, last: bool) -> Tensor:
        with boundary(self._model, last=last or self._hop2_every_micro_step):
            loss = self.built.summed_loss(self._model, inputs, targets) / tokens
            (loss * self._scale.value).backward()  # type: ignore[no-untyped-call]  # torch
        return loss.detach()

    def update(self) -> None:
        norm = clip(self._model, self._max_norm, scale=self._scale.value)
        overflowed = (~torch.isfinite(norm)).float()
        optimizer_step(self._optimizer, overflowed)
        self._scale.update(overflowed)
        self._optimizer.zero_grad(set_to_none=True)

    def counted_bytes(self) -> int | None:
        counts = self._connection.meter.take().values()
        return sum(count.traffic_bytes for count in counts) if self._counts else None

    def close(self) -> None:
        disconnect(self._connection)
