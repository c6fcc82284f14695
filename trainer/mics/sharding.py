"""MiCS on FSDP2: `connect` makes the groups from plain integers, `apply` shards a model over them.

    connection = connect(grid)
    apply(model, connection, blocks=model.blocks)
    for micro, batch in enumerate(batches):
        with boundary(model, last=micro == accumulation - 1):
            (summed_loss(model, batch) / tokens_in_step).backward()
    norm = clip(model, max_norm)
    optimizer.step()

Gradients are sums over all ranks, so the loss of a rank is divided by the number of tokens of all ranks and all
micro-steps of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mics.collectives import (
    FlatGather,
    FlatReduceScatter,
    HierarchicalGather,
    HierarchicalReduceScatter,
    Meter,
    group_ranks,
    size_bytes,
)
from mics.strategies import Reshard, check_reshard
from mics.topology import Group, RankGrid, group_of

M = TypeVar("M", bound=nn.Module)


class ReplicaMismatchError(RuntimeError):
    """The replicas of a model do not hold the same weights."""


@dataclass(frozen=True)
class Connection:
    """This rank's process groups on one rank grid.

    shard      the partition group
    replicate  the replication group; None where there is one replica
    across     hierarchical only: the ranks with my local rank, one on each node of my partition group
    inside     hierarchical only: the ranks of my partition group on my node
    timeout    of each collective in these groups; None = the backend's default
    """

    grid: RankGrid
    mesh: DeviceMesh
    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None
    timeout: timedelta | None
    meter: Meter


def connect(grid: RankGrid, *, device: str = "cpu", timeout: timedelta | None = None) -> Connection:
    """Make the groups and the mesh of `grid`; every rank calls it, after `init_process_group`.

    device   "cpu" or "cuda"
    timeout  of each collective in these groups; None = the backend's default

    Raises ValueError where the world size is not the grid's, RuntimeError where torch ordered a group otherwise.
    """
    if dist.get_world_size() != grid.world_size:
        raise ValueError(f"the grid is for {grid.world_size} ranks, the process group has {dist.get_world_size()}")
    partition, replication = grid.partition_groups(), grid.replication_groups()
    shard = _my_group(partition, timeout)
    replicate = _my_group(replication, timeout) if grid.replicas > 1 else None
    across = _my_group(grid.across_groups(), timeout) if grid.hierarchical else None
    inside = _my_group(grid.inside_groups(), timeout) if grid.hierarchical else None
    if replicate is None:
        mesh = DeviceMesh.from_group(shard, device, mesh=list(partition[0]), mesh_dim_names=("shard",))
    else:
        rows = torch.tensor(partition)
        mesh = DeviceMesh.from_group([replicate, shard], device, mesh=rows, mesh_dim_names=("replicate", "shard"))
    meter = Meter(grid.devices_per_node, device)
    return Connection(grid, mesh, shard, replicate, across, inside, timeout, meter)


def _my_group(groups: Iterable[Group], timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of this rank; creates all of them, since creation is collective over the world."""
    rank = dist.get_rank()
    made = {ranks: dist.new_group(list(ranks), timeout=timeout, sort_ranks=False) for ranks in groups}
    expected = group_of(rank, made)
    mine: dist.ProcessGroup = made[expected]
    # Shards sit in the order of the group, the mesh believes in the order of its rows. Sorted ranks (what new_group
    # and DeviceMesh make by default) would train on permuted weights without any error.
    if group_ranks(mine) != expected or mine.rank() != expected.index(rank):
        raise RuntimeError(f"torch ordered the process group {group_ranks(mine)}, the rank grid needs {expected}")
    return mine


def disconnect(connection: Connection) -> None:
    """Give the groups of a connection back. Collective over the world."""
    dist.barrier()  # a fast rank would close connections that a slow one still reads: gloo aborts then, at times
    for group in (connection.inside, connection.across, connection.replicate, connection.shard):
        if group is not None:
            dist.destroy_process_group(group)


def apply(
    model: M,
    connection: Connection,
    *,
    blocks: Iterable[nn.Module],
    gather_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard: Reshard = True,
) -> M:
    """Shard `model` in place over the partition group, block by block and then the rest, and return it.

    blocks        modules of the model that are gathered one at a time
    gather_dtype  of the gathered weights and the computation; None = the parameter's own
    reduce_dtype  of the gradient sums of both hops; None = that of the gradients
    reshard       how long the gathered weights of a block live (`mics.strategies`). Collective over the world where it
                  is a number of devices

    Raises ValueError where `reshard` is a number of devices that cannot share a copy inside one node.
    """
    check_reshard(reshard, connection.grid)
    precision = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=reduce_dtype)
    blocks = list(blocks)
    for block in blocks:
        fully_shard(
            block, mesh=connection.mesh, mp_policy=precision, reshard_after_forward=reshard not in (False, "step")
        )
    fully_shard(model, mesh=connection.mesh, mp_policy=precision)
    if not isinstance(reshard, bool | str):
        _share_copies(blocks, connection, reshard)
    gather, reduce_scatter = collectives_of(connection)
    for module in _sharded_modules(model):  # the setters are not recursive
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce_scatter)
        if connection.replicate is not None:
            module.set_all_reduce_hook(_count_hop2(connection.meter, connection.replicate))
    # Without it a parameter that gets no gradient in one micro-step shifts all that follow it in the reduce buffer.
    _root(model).set_reduce_scatter_unused_params(True)
    if reshard == "step":
        _root(model).set_reshard_after_backward(False)
    return model


def _share_copies(blocks: Iterable[nn.Module], connection: Connection, devices: int) -> None:
    """Between forward and backward, let every `devices` neighbours on a node share one copy of each block's weights.

    FSDP2's own reshard_after_forward=<int> makes new process groups for every block (of NCCL hundreds of MB each), and
    takes the neighbours from the order of the partition group, where neighbours in hierarchical grids sit on different
    nodes. What it keeps is cut from the whole gathered weights, so any groups that lie in a partition group will do.
    """
    rows = connection.grid.sharing_groups(devices)
    groups = [_my_group(ranks, connection.timeout) for ranks in (tuple(zip(*rows, strict=True)), rows)]
    names = ("copies", "copy")  # FSDP2 wants a group across the copies too; it never uses it
    mesh = DeviceMesh.from_group(groups, connection.mesh.device_type, mesh=torch.tensor(rows), mesh_dim_names=names)
    sharing = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _parameter_groups(blocks):
        group.post_forward_mesh_info = sharing
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = sharing
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def collectives_of(connection: Connection) -> tuple[FlatGather, FlatReduceScatter]:
    """The gather and the reduce-scatter of hop 1 that belong to its grid."""
    meter, shard, across, inside = connection.meter, connection.shard, connection.across, connection.inside
    if across is None or inside is None:
        return FlatGather(meter), FlatReduceScatter(meter)
    return HierarchicalGather(meter, shard, across, inside), HierarchicalReduceScatter(meter, across, inside)


def _count_hop2(meter: Meter, replicate: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """FSDP2 calls it with the buffer of each hop 2 (padding included), right after the all-reduce."""

    def count(reduced: torch.Tensor) -> None:
        meter.hop2(replicate, size_bytes(reduced))

    return count


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _parameter_groups(modules: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """What FSDP2 gathers and reduces at once: one per sharded module that has parameters of its own."""
    sharded = (module for module in modules if isinstance(module, FSDPModule))
    return [group for module in sharded for group in module._get_fsdp_state()._fsdp_param_groups]


def _root(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} is not sharded; call mics.apply on it first")
    return model


@contextmanager
def boundary(model: nn.Module, last: bool) -> Iterator[None]:
    """One micro-step. Gradients cross the replicas (hop 2) only in the last one of an optimizer step.

    The hop 1 results of the earlier micro-steps wait in a sharded buffer, which is added before the all-reduce. After
    an exception in the body that buffer is still there: call `abort`. Weights that are kept until the step are freed in
    the last backward pass.
    """
    root = _root(model)
    # Not set_is_last_backward(False): it would keep the root's reduce-scatter input alive through the next forward.
    root.set_requires_all_reduce(last)
    kept_until_step = not all(group.reshard_after_backward for group in _parameter_groups(model.modules()))
    if last and kept_until_step:
        root.set_reshard_after_backward(True)
    try:
        yield
    finally:
        if kept_until_step:
            root.set_reshard_after_backward(False)


def abort(model: nn.Module) -> None:
    """Forget an accumulation that was not finished; the next micro-step starts a new one.

    Also after forward passes without a backward (validation): they leave weights gathered, and a prefetch order that
    would make the next backward pass gather a block too much.

    `zero_grad` alone does not: the sums of hop 1 and half-made gradients of gathered weights live outside `grad`.
    Call it on the model that was given to `apply`, on every rank.
    """
    _root(model).reset_iter_state()
    model.zero_grad(set_to_none=True)
    for group in _parameter_groups(model.modules()):
        for parameter in group.fsdp_params:
            # reset_iter_state forgets these: a backward pass that broke inside a block has filled some of them
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # after the first gather
                parameter._unsharded_param.grad = None


def clip(model: nn.Module, max_norm: float, *, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before, a plain scalar.

    The 2-norm over all parameters of one replica, each element counted once: sum of squares of the local shards, summed
    over the partition group.

    scale  the factor that was on the loss, a scalar tensor: gradients are divided by it in the same multiplication, and
           the norm is that of the divided ones

    Where it is not finite, the gradients are worth nothing any more: skip that optimizer step.
    """
    parameters = list(model.parameters())
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    first = parameters[0]
    nothing = _local(first.detach()).new_zeros(())  # the part of a rank without gradients in the sum over the ranks
    squared = torch.nn.utils.get_total_norm(gradients) ** 2 if gradients else nothing
    if isinstance(first, DTensor):
        mesh = first.device_mesh
        dist.all_reduce(squared, group=mesh.get_group("shard"))
        if "replicate" in (mesh.mesh_dim_names or ()):
            # Replicas whose sums are taken in another order would differ by a bit, and from then on drift apart.
            dist.all_reduce(squared, op=dist.ReduceOp.MAX, group=mesh.get_group("replicate"))
    norm = squared.sqrt()
    if scale is not None:
        norm = norm / scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, factor if scale is None else factor / scale)
    return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replica_checksum(model: nn.Module) -> torch.Tensor:
    """One int64 per parameter: the sum of the bit patterns of this rank's shard. [parameters], on the model's device.

    Sums of integers do not depend on the order of the additions, so equal shards have equal checksums on any machine.
    """
    return torch.stack([_bit_sum(_local(parameter.detach())) for parameter in model.parameters()])


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integers).sum(dtype=torch.int64)


def check_replicas(model: nn.Module, connection: Connection) -> None:
    """Raise ReplicaMismatchError on every rank where the replicas' weights differ anywhere; names a parameter.

    Collective over the world. Call it before the first step and after a resume: replicas that start different stay
    different, and nothing else complains.
    """
    if connection.replicate is None:
        return
    mine = replica_checksum(model)
    every = mine.new_empty(connection.grid.replicas * mine.numel())
    dist.all_gather_single(every, mine, group=connection.replicate)
    differs = (every.view(connection.grid.replicas, -1) != mine).any(dim=0)
    dist.all_reduce(counts := differs.to(torch.int64))  # over the world, so that all ranks stop and none waits
    names = [name for (name, _), count in zip(model.named_parameters(), counts.tolist(), strict=True) if count]
    if names:
        raise ReplicaMismatchError(
            f"the replicas hold different weights in {len(names)} of {len(counts)} parameters, first {names[0]}: "
            "they were initialised or loaded differently"
        )
