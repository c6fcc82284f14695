"""The order in which nodes get their ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from micsctl.topology.model import NodeFacts


def order(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Nodes that share the nearest network node are adjacent, and so are such groups under a common coarser one.

    A partition group is a run of neighbours in this order, so its gathers cross as few switches as they can. Where
    nothing else decides, the node's index does: node 0 stays first, because it is rank 0 and the laptop's way in.
    Nodes whose network nodes are unknown count as one group.
    """
    by_index = sorted(nodes, key=lambda node: node.index)
    leader: dict[tuple[str, ...], NodeFacts] = {}  # of each group: its lowest index
    for node in by_index:
        leader.setdefault(node.network_nodes[-1:], node)
    first: dict[tuple[str, ...], int] = {}  # of each layer's network node: the lowest index below it
    for node in by_index:
        path = leader[node.network_nodes[-1:]].network_nodes
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], node.index)

    layers = max((len(node.network_nodes) for node in nodes), default=0)

    def key(node: NodeFacts) -> tuple[int, ...]:
        head = leader[node.network_nodes[-1:]]
        path = head.network_nodes
        known = [first[path[:depth]] for depth in range(1, len(path) + 1)]
        return (*known, *[head.index] * (layers - len(path)), node.index)

    return tuple(sorted(by_index, key=key))
