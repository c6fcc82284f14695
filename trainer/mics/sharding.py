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

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mics.collectives import (
    FlatGather,
    FlatReduceScatter,
    GatherLanes,
    HierarchicalGather,
    HierarchicalReduceScatter,
    Meter,
    group_ranks,
    size_bytes,
)
from mics.lanes import Lane
from mics.strategies import Reshard, check_reshard
from mics.topology import Group, RankGrid, group_of

M = TypeVar("M", bound=nn.Module)
REDUCE_LANES = 2
BLOCKS_AHEAD = 2  # that a forward pass on CPU gathers: one crosses the network while the model waits for the other


class ReplicaMismatchError(RuntimeError):
    """The replicas of a model do not hold the same weights."""


@dataclass(frozen=True)
class Groups:
    """This rank's process groups on one rank grid.

    shard      the partition group
    replicate  the replication group; None where there is one replica
    across     hierarchical only: the ranks with my local rank, one on each node of my partition group
    inside     hierarchical only: the ranks of my partition group on my node
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None

    def destroy(self) -> None:
        for group in (self.inside, self.across, self.replicate, self.shard):
            if group is not None:
                dist.destroy_process_group(group)


class ReduceLane:
    """CPU only: where both hops of a block run while the next block's backward pass computes.

    Its process groups are its own: ranks need not agree on the order of its collectives among those of other lanes.
    One reduction at a time is under way, as on a GPU (`reduce_scatter_max_input_buffers`).
    """

    def __init__(self, groups: Groups, meter: Meter) -> None:
        self.groups = groups
        self._lane, self._meter = Lane("reduce"), meter
        self._last: Future[None] | None = None

    def submit(self, reduction: Callable[[], None]) -> None:
        """Start it after the one before; raises what that one raised."""
        self.wait()
        self._last = self._lane.submit(reduction)

    def wait(self) -> None:
        if self._last is not None:
            last, self._last = self._last, None
            self._meter.wait_for(last)

    def close(self) -> None:
        self._lane.close()
        self.groups.destroy()


@dataclass(frozen=True)
class Connection:
    """What `connect` makes of a rank grid on this rank.

    groups        also those of the mesh
    timeout       of each collective; None = the backend's default
    gather_lanes  CPU only: where gathers run, in `groups`
    reduce_lanes  CPU only: blocks take them in turns, so that one block's hop 1 runs beside another's hop 2
    """

    grid: RankGrid
    mesh: DeviceMesh
    groups: Groups
    timeout: timedelta | None
    meter: Meter
    gather_lanes: GatherLanes | None
    reduce_lanes: tuple[ReduceLane, ...]

    def settle(self) -> None:
        """Wait for the reductions that are under way: between micro-steps there may be some (CPU)."""
        for lane in self.reduce_lanes:
            lane.wait()

    @property
    def shard(self) -> dist.ProcessGroup:
        return self.groups.shard

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        return self.groups.replicate


def connect(grid: RankGrid, *, device: str = "cpu", timeout: timedelta | None = None) -> Connection:
    """Make the groups and the mesh of `grid`; every rank calls it, after `init_process_group`.

    device   "cpu" or "cuda"
    timeout  of each collective in these groups; None = the backend's default

    Raises ValueError where the world size is not the grid's, RuntimeError where torch ordered a group otherwise.
    """
    if dist.get_world_size() != grid.world_size:
        raise ValueError(f"the grid is for {grid.world_size} ranks, the process group has {dist.get_world_size()}")
    groups, partition = _my_groups(grid, timeout), grid.partition_groups()
    if groups.replicate is None:
        mesh = DeviceMesh.from_group(groups.shard, device, mesh=list(partition[0]), mesh_dim_names=("shard",))
    else:
        rows, names = torch.tensor(partition), ("replicate", "shard")
        mesh = DeviceMesh.from_group([groups.replicate, groups.shard], device, mesh=rows, mesh_dim_names=names)
    meter = Meter(grid.devices_per_node, device)
    if device != "cpu":
        return Connection(grid, mesh, groups, timeout, meter, None, ())
    gather_lanes = GatherLanes(Lane("gather across"), Lane("gather inside"))
    reduce_lanes = tuple(ReduceLane(_my_groups(grid, timeout), meter) for _ in range(REDUCE_LANES))
    return Connection(grid, mesh, groups, timeout, meter, gather_lanes, reduce_lanes)


def _my_groups(grid: RankGrid, timeout: timedelta | None) -> Groups:
    return Groups(
        shard=_my_group(grid.partition_groups(), timeout),
        replicate=_my_group(grid.replication_groups(), timeout) if grid.replicas > 1 else None,
        across=_my_group(grid.across_groups(), timeout) if grid.hierarchical else None,
        inside=_my_group(grid.inside_groups(), timeout) if grid.hierarchical else None,
    )


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
    connection.settle()
    dist.barrier()  # a fast rank would close connections that a slow one still reads: gloo aborts then, at times
    if connection.gather_lanes:
        connection.gather_lanes.close()
    for lane in connection.reduce_lanes:
        lane.close()
    connection.groups.destroy()


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
    if connection.reduce_lanes:
        _overlap(model, blocks, connection)
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
    """The gather and the reduce-scatter of hop 1 that belong to its grid. On CPU the gather runs in lanes."""
    meter, groups, lanes = connection.meter, connection.groups, connection.gather_lanes
    reduce_scatter = _reduce_scatter_of(groups, meter)
    if groups.across is None or groups.inside is None:
        return FlatGather(meter, lanes), reduce_scatter
    return HierarchicalGather(meter, groups.shard, groups.across, groups.inside, lanes), reduce_scatter


def _reduce_scatter_of(groups: Groups, meter: Meter) -> FlatReduceScatter:
    if groups.across is None or groups.inside is None:
        return FlatReduceScatter(meter)
    return HierarchicalReduceScatter(meter, groups.across, groups.inside)


def _overlap(model: nn.Module, blocks: Sequence[nn.Module], connection: Connection) -> None:
    """Let gathers and reductions on CPU run in lanes while the model computes.

    FSDP2 gathers the next block of a backward pass ahead by itself; for the forward pass it has to be told.
    """
    order, lanes = [_root(module) for module in (model, *blocks)], connection.reduce_lanes
    for index, module in enumerate(order):
        lane = lanes[index % len(lanes)]
        module.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + BLOCKS_AHEAD])
        module.set_custom_reduce_scatter(_reduce_scatter_of(lane.groups, connection.meter))
        for group in _parameter_groups([cast(nn.Module, module)]):
            group.__class__ = _OverlappedGroup
            cast(_OverlappedGroup, group).lane = lane


class _OverlappedGroup(FSDPParamGroup):
    """FSDP2's parameter group, with reductions in a lane. FSDP2 itself overlaps by streams, which a CPU has not.

    Gradients of micro-steps before the boundary are not waited for: the next one starts to gather at once.
    """

    lane: ReduceLane

    def post_backward(self, *unused: Any) -> None:
        """As in torch 2.13, without streams and events."""
        if not self.reduce_grads:
            super().post_backward()
            return
        self._training_state = TrainingState.POST_BACKWARD
        for parameter in self.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
        gradients = [(p, g) for p in self.fsdp_params if (g := self._take_gradient(p)) is not None]
        if self.reshard_after_backward:
            self.reshard()
        if gradients:
            self.lane.submit(partial(self._reduce, gradients, self.all_reduce_grads))

    def finalize_backward(self) -> None:
        if self.all_reduce_grads:
            self.lane.wait()
        super().finalize_backward()  # type: ignore[no-untyped-call]  # torch

    def _reset_iter_state(self) -> None:
        self.lane.wait()
        super()._reset_iter_state()

    def _take_gradient(self, parameter: FSDPParam) -> torch.Tensor | None:
        if not hasattr(parameter, "_unsharded_param"):
            return None
        if parameter.unsharded_accumulated_grad is not None:
            gradient = parameter.unsharded_accumulated_grad_data
            parameter.unsharded_accumulated_grad = None
        elif parameter.unsharded_param.grad is not None:
            gradient = parameter.unsharded_grad_data
            parameter.unsharded_param.grad = None
        elif self.reduce_scatter_unused_params and parameter.unsharded_param.requires_grad:
            gradient = parameter.unsharded_zero_grad_data
        else:
            return None
        return gradient

    def _reduce(self, gradients: list[tuple[FSDPParam, torch.Tensor]], last: bool) -> None:
        """Hop 1, and where this is the `last` micro-step hop 2. Frees the gradients once copied."""
        stream, groups = self.comm_ctx.reduce_scatter_stream, self.lane.groups
        parameters, values = [p for p, _ in gradients], [g for _, g in gradients]
        gradients.clear()
        *_, self._partial_reduce_output = foreach_reduce(
            parameters,
            values,
            groups.shard,
            stream,
            self._reduce_scatter_comm,
            self._orig_dtype,
            self._reduce_dtype,
            self.device,
            self.gradient_divide_factor,
            groups.replicate,
            stream,
            last,
            self._partial_reduce_output,
            self._all_reduce_hook,
            self.force_sum_reduction_for_comms,
        )


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
