"""Both stages of a hierarchical collective at once, in pieces: what crosses nodes does not wait for what stays inside.

Two collectives one after the other leave the link idle while the node talks to itself. Here a ring runs across the
nodes all the time. The gather passes each piece on inside the node when it arrives; the reduce-scatter adds the next
pieces inside the node while the last ones travel. For gloo: NCCL does not come back to the host between pieces. The
bytes are those of two rings (`mics.traffic`): inside the node each rank sends to each other one directly, which is as
much as a ring sends.

Both block until the collective is over. Their tags keep a gather and a reduce-scatter on the same groups apart; two
gathers at a time must not share a group, nor two reduce-scatters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mics.messages import receive, send

PIECE_BYTES = 512 << 10
GATHER_TAG, REDUCE_SCATTER_TAG = 1, 2


def relay_gather(
    output: torch.Tensor, input: torch.Tensor, across: dist.ProcessGroup, inside: dist.ProcessGroup
) -> None:
    """Bring the shards of all ranks of a partition group together.

    output  [k * nodes * m], contiguous, in the order of a hierarchical partition group: by local rank, then by node
    input   [m], this rank's shard; may be its own place in `output`

    The partition group spans nodes.
    """
    ring, node = _Peers(across, GATHER_TAG), _Peers(inside, GATHER_TAG)
    blocks = output.view(node.size, ring.size, -1)
    column, count = blocks[node.place], _pieces(input)
    if column[ring.place].data_ptr() != input.data_ptr():
        column[ring.place].copy_(input.view(-1))
    order = ring.backwards()  # my own chunk, then as they come
    from_node = [
        node.receive(piece, other)
        for chunk in order
        for other in node.others
        for piece in blocks[other, chunk].chunk(count)
    ]
    arrivals = deque(ring.receive(piece, ring.before) for chunk in order[1:] for piece in column[chunk].chunk(count))
    sent = [ring.send(piece, ring.after) for piece in column[ring.place].chunk(count)]
    for chunk in order:
        for piece in column[chunk].chunk(count):
            if chunk != ring.place:
                arrivals.popleft().wait()
                if chunk != order[-1]:
                    sent.append(ring.send(piece, ring.after))
            sent += [node.send(piece, other) for other in node.others]
    for work in (*from_node, *sent):
        work.wait()


def relay_reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, across: dist.ProcessGroup, inside: dist.ProcessGroup
) -> None:
    """Sum `input` over all ranks of a partition group; each gets its own chunk of the sum.

    input   [k * nodes * m], contiguous, in the order of a hierarchical partition group; used as working memory, so its
            content is lost
    output  [m]; may be this rank's chunk of `input`

    The partition group spans nodes.
    """
    ring, node = _Peers(across, REDUCE_SCATTER_TAG), _Peers(inside, REDUCE_SCATTER_TAG)
    blocks, results = input.view(node.size, ring.size, -1), output.view(-1).chunk(_pieces(output))
    count = len(results)
    order = [*ring.backwards()[1:], ring.place]  # what has the longest way first, my own chunk last
    parts = [[blocks[local, chunk].chunk(count) for local in range(node.size)] for chunk in order]
    todo = [piece for chunk in parts for piece in zip(*chunk, strict=True)]  # of each: the parts by local rank
    landing = torch.empty_like(output).view(-1).chunk(count)
    near = [torch.empty_like(landing[0]) for _ in node.others]
    sent: list[dist.Work] = []

    def exchange(piece: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, dist.Work]]:
        """Give the others their parts of a piece; what they give for mine is on its way. One piece at a time: more
        would hold up the ring."""
        sent.extend(node.send(piece[other], other) for other in node.others)
        free = [buffer[: len(piece[0])] for buffer in near]
        return [(buffer, node.receive(buffer, other)) for buffer, other in zip(free, node.others, strict=True)]

    arrivals = deque(ring.receive(piece, ring.before) for piece in landing)
    coming = exchange(todo[0])
    for place, piece in enumerate(todo):
        mine, index = piece[node.place], place % count
        for part, work in coming:
            work.wait()
            mine.add_(part)
        if place + 1 < len(todo):
            coming = exchange(todo[place + 1])
        last = place + count >= len(todo)
        if place >= count:  # the sum of the nodes before me
            arrivals.popleft().wait()
            torch.add(mine, landing[index], out=results[index] if last else mine)
            if not last:
                arrivals.append(ring.receive(landing[index], ring.before))
        if not last:
            sent.append(ring.send(mine, ring.after))
    for work in sent:
        work.wait()


class _Peers:
    """The other ranks of a group, for messages that no other tag sees. `before` and `after` me in a ring."""

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group, self._tag = group, tag
        self.size, self.place = group.size(), group.rank()
        self.others = [other for other in range(self.size) if other != self.place]
        self.before, self.after = (self.place - 1) % self.size, (self.place + 1) % self.size

    def backwards(self) -> list[int]:
        """All places, from mine on against the ring."""
        return [(self.place - step) % self.size for step in range(self.size)]

    def send(self, piece: torch.Tensor, other: int) -> dist.Work:
        return send(piece, other, self._group, self._tag)

    def receive(self, piece: torch.Tensor, other: int) -> dist.Work:
        return receive(piece, other, self._group, self._tag)


def _pieces(shard: torch.Tensor) -> int:
    """Into how many pieces a shard is cut: equal ones (the last may be smaller) of at most PIECE_BYTES."""
    return max(1, -(-shard.numel() * shard.element_size() // PIECE_BYTES))
