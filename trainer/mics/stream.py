"""What one TCP connection between two nodes carries: the link as it is, with nothing of ours on it."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import dataclass

import torch.distributed as dist

from mics.errors import RunRefusedError
from mics.probes import Pair, slice_rates
from mics.ranks import Place, together

BLOCK_BYTES = 1 << 20
SLICES = 10  # of a stream; more do not move the median
ANSWER_SECONDS = 20.0  # for a connection, and for the next byte


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one stream, by the receiver's clock: over its slices."""

    median: float
    min: float
    max: float


def one_way(routes: list[Pair], place: Place, *, seconds: float) -> list[Rates]:
    """A stream over each route (from node, to node) at the same time, between the first processes of the nodes.

    The same on every rank. Collective over the world. Raises RunRefusedError on all ranks where a node does not reach
    another one.
    """
    sends = {sender: receiver for sender, receiver in routes if place.local_rank == 0}
    comes_from = {receiver: sender for sender, receiver in sends.items()}
    server = together(lambda: _listen() if place.node in comes_from else None, place)
    addresses: list[tuple[str, int] | None] = [None] * place.world_size
    dist.all_gather_object(addresses, server.getsockname()[:2] if server else None)

    def stream() -> Rates | None:
        if server:
            return _receive(server, seconds, comes_from[place.node])
        if place.node in sends:
            target = addresses[sends[place.node] * place.local_world_size]
            assert target is not None  # that node listens
            _send(target, seconds, sends[place.node])
        return None

    every: list[Rates | None] = [None] * place.world_size
    dist.all_gather_object(every, together(stream, place))
    received = [every[receiver * place.local_world_size] for _, receiver in routes]
    return [rates for rates in received if rates]


def _listen() -> socket.socket:
    """On the address from which this node reaches the first one: the network that the ranks use."""
    head = os.environ["MASTER_ADDR"]
    try:
        family, *_, address = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            own = probe.getsockname()[0]
        return socket.create_server((own, 0), family=family)
    except OSError as error:
        raise RunRefusedError(f"cannot listen for a TCP stream on the way to {head}: {error}") from error


def _receive(server: socket.socket, seconds: float, sender: int) -> Rates:
    block, arrivals, count = bytearray(BLOCK_BYTES), list[tuple[float, int]](), 0
    try:
        with server:
            server.settimeout(ANSWER_SECONDS)
            stream, _ = server.accept()
        with stream:
            stream.settimeout(ANSWER_SECONDS + seconds)
            while size := stream.recv_into(block):
                count += size
                arrivals.append((time.perf_counter(), count))
        rates = slice_rates(arrivals, slices=SLICES)
        return Rates(statistics.median(rates), min(rates), max(rates))
    except (OSError, IndexError, statistics.StatisticsError) as error:
        raise RunRefusedError(f"the TCP stream from node {sender} broke after {count} bytes: {error}") from error


def _send(target: tuple[str, int], seconds: float, receiver: int) -> None:
    block = bytes(BLOCK_BYTES)
    try:
        with socket.create_connection(target, timeout=ANSWER_SECONDS) as stream:
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                stream.sendall(block)
    except OSError as error:
        raise RunRefusedError(f"the TCP stream to node {receiver} at {target[0]}:{target[1]} broke: {error}") from error
