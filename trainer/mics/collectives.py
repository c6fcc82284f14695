"""The gather and the reduce-scatter of a partition group, in one stage or two, counted.

FSDP2 hands a gather one flat output buffer in the rank order of the partition group, and an input that is a view into
it. A hierarchical rank grid makes the node the fast axis of that order. So the gather across nodes fills one
contiguous column of the buffer and the gather inside the node fills the rest, both in place. The reduce-scatter is the
mirror image: inside the node first, so that only 1/k of the bytes cross nodes. On CPU both stages run at once, in
pieces (`mics.relay`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from mics.lanes import Lane
from mics.messages import receive, send
from mics.relay import relay_gather, relay_reduce_scatter
from mics.topology import Group
from mics.traffic import crosses_node

if torch.__version__.split(".")[:2] != ["2", "13"]:
    # The interfaces below, the way FSDP2 calls them, and what `sharding.abort` reaches into are private to torch.
    raise ImportError(f"mics needs torch 2.13, this is torch {torch.__version__}; install torch==2.13.0")

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

Pass = Literal["gather", "hop1"]
StageName = Literal["gather_across", "gather_inside", "hop1_across", "hop1_inside", "hop2"]
STAGES: tuple[StageName, ...] = get_args(StageName)

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType
_Instant = float | torch.cuda.Event
_OPEN_INTERVALS = 4096


@dataclass(frozen=True)
class StageCount:
    """What one rank did in one stage: collectives, bytes it sent to other nodes, seconds from start to end."""

    calls: int = 0
    traffic_bytes: int = 0
    seconds: float = 0.0


def ring_traffic_bytes(group: dist.ProcessGroup, message_bytes: int, devices_per_node: int) -> int:
    """Bytes that this rank sends to another node in one gather or reduce-scatter of `message_bytes` over `group`.

    A ring in group order: every rank sends (g-1)/g of the message to its successor (source: `mics.traffic`). An
    all-reduce is two such passes.
    """
    ranks = group_ranks(group)
    if not crosses_node(ranks[group.rank()], ranks, devices_per_node):
        return 0
    return message_bytes * (len(ranks) - 1) // len(ranks)


def group_ranks(group: dist.ProcessGroup) -> Group:
    """Global ranks of a process group, in the order of the group."""
    return tuple(dist.get_process_group_ranks(group))


class Meter:
    """Counts calls, traffic and time per stage on this rank, from one `take` to the next.

    A collective over a group that spans nodes is counted as `_across`, one on a single node as `_inside`; a flat
    collective is a single stage. Seconds are wall-clock on CPU; on CUDA they lie between events on the stream of the
    collective, and only `take` waits for them. Stages may overlap, so their seconds do not add up to the step.

    Several threads may count at the same time.
    """

    def __init__(self, devices_per_node: int, device: str = "cpu") -> None:
        self._devices_per_node = devices_per_node
        self._on_cuda = device == "cuda"
        self._calls = dict.fromkeys(STAGES, 0)
        self._traffic_bytes = dict.fromkeys(STAGES, 0)
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._open: deque[tuple[StageName, tuple[_Instant, ...], _Instant]] = deque()  # stage, starts, end
        self._hop2_end = self._now()
        self._marks: dict[int, _Instant] = {}  # by thread
        self._lock = threading.Lock()
        self._ended, self._running = 0, list[StageName]()
        self._exposed_seconds = 0.0

    def current(self) -> tuple[int, StageName | None]:
        """Collectives so far, and one that the host is in now, the oldest; another thread may ask. Hop 2 is seen at its
        end."""
        with self._lock:
            return self._ended, self._running[0] if self._running else None

    def wait_for(self, collective: Future[Any]) -> None:
        """Wait for a collective in a lane, and count the time for which the computation stands still."""
        started = time.perf_counter()
        try:
            collective.result()
        finally:
            self._exposed_seconds += time.perf_counter() - started

    def take_exposed_seconds(self) -> float:
        """Seconds of `wait_for` since the last call."""
        seconds, self._exposed_seconds = self._exposed_seconds, 0.0
        return seconds

    def spans_nodes(self, group: dist.ProcessGroup) -> bool:
        return len({rank // self._devices_per_node for rank in group_ranks(group)}) > 1

    @contextmanager
    def ring_pass(self, kind: Pass, group: dist.ProcessGroup, message_bytes: int) -> Iterator[None]:
        """Count the gather or reduce-scatter in the body: `message_bytes` is the size of its larger buffer."""
        stage: StageName = f"{kind}_{'across' if self.spans_nodes(group) else 'inside'}"  # type: ignore[assignment]  # one of STAGES
        with self._lock:
            self._running.append(stage)
        start = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(stage)
        self._add(stage, ring_traffic_bytes(group, message_bytes, self._devices_per_node), start)

    def mark(self) -> None:
        """Note the moment before a hop 2: FSDP2 issues it itself, so only the moments around it can be seen."""
        self._marks[threading.get_ident()] = self._now()

    def hop2(self, group: dist.ProcessGroup, message_bytes: int) -> None:
        """Count one all-reduce of `message_bytes`, ended just now. It began at the last `mark`, or after the one before
        where that ended later: on CUDA they queue on a stream of their own."""
        traffic_bytes = 2 * ring_traffic_bytes(group, message_bytes, self._devices_per_node)
        mark = self._marks[threading.get_ident()]
        # In lanes they do not queue
        starts = (mark, self._hop2_end) if self._on_cuda else (mark,)
        self._hop2_end = self._add("hop2", traffic_bytes, *starts)

    def take(self) -> dict[StageName, StageCount]:
        """The counts since the last call, for every stage; then starts from zero."""
        with self._lock:
            while self._open:
                self._fold()
        counts = {s: StageCount(self._calls[s], self._traffic_bytes[s], self._seconds[s]) for s in STAGES}
        self._calls = dict.fromkeys(STAGES, 0)
        self._traffic_bytes = dict.fromkeys(STAGES, 0)
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return counts

    def _add(self, stage: StageName, traffic_bytes: int, *starts: _Instant) -> _Instant:
        """Count a collective that begins at the last of `starts` and has just ended; returns its end."""
        end = self._now()
        with self._lock:
            self._ended += 1
            self._calls[stage] += 1
            self._traffic_bytes[stage] += traffic_bytes
            self._open.append((stage, starts, end))
            if len(self._open) > _OPEN_INTERVALS:  # nobody takes: the oldest has long ended, so this does not wait
                self._fold()
        return end

    def _fold(self) -> None:
        stage, starts, end = self._open.popleft()
        self._seconds[stage] += min(_seconds_between(start, end) for start in starts)

    def _now(self) -> _Instant:
        if not self._on_cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        event.record()
        return event


def _seconds_between(start: _Instant, end: _Instant) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return float(end - start)  # type: ignore[operator]  # both are
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def ring_reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `input` over the group; the rank at position i gets chunk i of it in `output`.

    input   [g * m], contiguous; used as working memory, so its content is lost
    output  [m]; may be chunk i of `input` itself

    Every rank sends (g-1)/g of the message to its successor, as NCCL's ring does. gloo's own reduce-scatter is an
    all-reduce inside and sends twice that. Source: the first half of the ring all-reduce in Patarasuk and Yuan,
    Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
    """
    size, position = group.size(), group.rank()
    chunks = input.view(-1).chunk(size)
    mine, total = chunks[position], output.view(-1)
    if size == 1:
        if total.data_ptr() != mine.data_ptr():
            total.copy_(mine)
        return
    received = torch.empty_like(mine)
    before, after = (position - 1) % size, (position + 1) % size
    for step in range(1, size):
        into = chunks[(position - step - 1) % size]
        arrival, sent = receive(received, before, group), send(chunks[(position - step) % size], after, group)
        arrival.wait()
        sent.wait()
        torch.add(into, received, out=total if step == size - 1 else into)


def ring_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put the input of every member of the group into `output`, in the order of the group.

    output  [g * m], contiguous
    input   [m]; may be this rank's chunk of `output` itself

    Every rank sends (g-1)/g of the message to its successor. gloo's own gather does too, but into a buffer of its own,
    which it then copies. Source: the second half of the same ring.
    """
    size, position = group.size(), group.rank()
    chunks = output.view(-1).chunk(size)
    if chunks[position].data_ptr() != input.data_ptr():
        chunks[position].copy_(input.view(-1))
    before, after = (position - 1) % size, (position + 1) % size
    # All of them ahead: gloo sends nothing before it knows that the other side is ready for it.
    arrivals = [receive(chunks[(position - step) % size], before, group) for step in range(1, size)]
    sent = []
    for step, arrival in enumerate(arrivals):
        sent.append(send(chunks[(position - step) % size], after, group))
        arrival.wait()
    for work in sent:
        work.wait()


def gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """The ring on CPU, the backend's own elsewhere."""
    if input.device.type == "cpu":
        ring_gather(output, input, group)
        return None
    work: dist.Work | None = dist.all_gather_single(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp) -> None:
    """The ring on CPU, the backend's own elsewhere (NCCL's is a ring). Raises ValueError for another op than SUM."""
    check_sums(op)
    if input.device.type == "cpu":
        ring_reduce_scatter(output, input, group)
    else:
        dist.reduce_scatter_single(output, input, op=op, group=group)


def check_sums(op: ReduceOp) -> None:
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"hop 1 sums gradients; {op} is not supported")


def size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class LaneWork(dist.Work):
    """A collective in a lane, as FSDP2 waits for it."""

    def __init__(self, collective: Future[Any], meter: Meter) -> None:
        super().__init__()
        self._collective, self._meter = collective, meter

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended; raises what it raised. The timeout that counts is that of the process group."""
        self._meter.wait_for(self._collective)
        return True


@dataclass(frozen=True)
class GatherLanes:
    """CPU only: where gathers run. Those inside a node do not queue behind those that cross nodes."""

    across: Lane
    inside: Lane

    def close(self) -> None:
        self.across.close()
        self.inside.close()


class FlatGather(AllGather):
    """FSDP2's gather in one stage.

    lanes  CPU only: every gather runs in one of them, whatever `async_op` says; wait for what the call returns
    """

    def __init__(self, meter: Meter, lanes: GatherLanes | None = None) -> None:
        self._meter, self._lanes = meter, lanes

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._lanes is None:
            return self._pass(output_tensor, input_tensor, group, async_op)
        lane = self._lanes.across if self._meter.spans_nodes(group) else self._lanes.inside
        return LaneWork(lane.submit(partial(self._pass, output_tensor, input_tensor, group)), self._meter)

    def _pass(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._meter.ring_pass("gather", group, size_bytes(output)):
            return gather(output, input, group, async_op)


class HierarchicalGather(FlatGather):
    """FSDP2's gather in two stages, both in place: across nodes into my column, then the columns inside the node."""

    def __init__(
        self,
        meter: Meter,
        shard: dist.ProcessGroup,
        across: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        lanes: GatherLanes | None = None,
    ) -> None:
        super().__init__(meter, lanes)
        self._shard, self._across, self._inside = shard, across, inside

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group is not self._shard:  # a smaller group, with reshard_after_forward=<int>
            return super().__call__(output_tensor, input_tensor, group, async_op)
        if self._lanes is not None:
            return LaneWork(self._lanes.across.submit(partial(self._relay, output_tensor, input_tensor)), self._meter)
        column = column_of(output_tensor, self._inside)
        # Ordered on the caller's stream. With async_op only the second stage leaves it, so FSDP2's own way (which calls
        # this on its gather stream, without async_op) hides both stages and an explicit unshard(async_op=True) one.
        self._pass(column, input_tensor, self._across)
        return self._pass(output_tensor, column, self._inside, async_op)

    def _relay(self, output: torch.Tensor, input: torch.Tensor) -> None:
        column = column_of(output, self._inside)
        with (
            self._meter.ring_pass("gather", self._across, size_bytes(column)),
            self._meter.ring_pass("gather", self._inside, size_bytes(output)),
        ):
            relay_gather(output, input, self._across, self._inside)


class FlatReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter in one stage: hop 1. On CPU it has ended when the call returns."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._meter.mark()  # p = 1 has no hop 1: what follows the allocation is hop 2
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> None:
        self._stages(output_tensor, input_tensor, group, op)
        self._meter.mark()

    def _stages(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp) -> None:
        with self._meter.ring_pass("hop1", group, size_bytes(input)):
            reduce_scatter(output, input, group, op)


class HierarchicalReduceScatter(FlatReduceScatter):
    """FSDP2's reduce-scatter in two stages: inside the node into my column of the input, then across nodes."""

    def __init__(self, meter: Meter, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> None:
        super().__init__(meter)
        self._across, self._inside = across, inside

    def _stages(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: ReduceOp) -> None:
        column = column_of(input, self._inside)
        if input.device.type != "cpu":
            super()._stages(column, input, self._inside, op)
            super()._stages(output, column, self._across, op)
            return
        check_sums(op)
        with (
            self._meter.ring_pass("hop1", self._inside, size_bytes(input)),
            self._meter.ring_pass("hop1", self._across, size_bytes(column)),
        ):
            relay_reduce_scatter(output, input, self._across, self._inside)


def column_of(buffer: torch.Tensor, inside: dist.ProcessGroup) -> torch.Tensor:
    """The contiguous part of a flat buffer that belongs to this rank's local rank, from every node."""
    width = buffer.numel() // inside.size()
    return buffer.narrow(0, inside.rank() * width, width)
