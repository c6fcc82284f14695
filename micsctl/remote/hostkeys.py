"""Host keys: read from an instance's console output, kept in a known_hosts file of the cluster's own."""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from micsctl.cluster.model import Cluster

_BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----(.*?)-----END SSH HOST KEY KEYS-----", re.S)
_KEY = re.compile(r"(ssh-\S+|ecdsa-\S+) (AAAA\S+)")


@dataclass(frozen=True)
class HostKey:
    """A public host key: its algorithm and its base64 body, as known_hosts spells them."""

    algorithm: str
    body: str


@dataclass(frozen=True)
class KnownHost:
    """The keys that may answer at one address."""

    address: str
    port: int
    keys: tuple[HostKey, ...]


def parse_console(text: str) -> list[HostKey]:
    """The host keys that cloud-init printed; [] while the block is absent or not yet whole.

    Images print the keys bare or behind a log prefix (`<14>Jan  1 00:00:00 ec2: ssh-ed25519 AAAA...`), so a key may
    stand anywhere in a line. After a reboot the last block counts. A key whose body does not name the algorithm
    before it (a line cut by the console's limit) is left out.
    """
    blocks = _BLOCK.findall(text.replace("\r", ""))
    found = _KEY.findall(blocks[-1]) if blocks else []
    keys = (HostKey(algorithm, body) for algorithm, body in found if _algorithm_of(body) == algorithm)
    return list(dict.fromkeys(keys))


def known_hosts_of(cluster: Cluster, keys_of_instance: Mapping[str, Sequence[HostKey]]) -> list[KnownHost]:
    """Entries for the private and the public address of every node; `keys_of_instance` by instance id."""
    return [
        KnownHost(address, cluster.ssh_port, tuple(keys_of_instance[node.instance_id]))
        for node in cluster.nodes
        for address in (node.private_ip, node.public_ip)
        if address
    ]


def known_name(address: str, port: int) -> str:
    """How known_hosts spells an address: plain on port 22, `[address]:port` on any other."""
    return address if port == 22 else f"[{address}]:{port}"


def write_known_hosts(path: Path, entries: Iterable[KnownHost]) -> None:
    """Replace the file, whole or not at all; mode 0600."""
    lines = [
        f"{known_name(entry.address, entry.port)} {key.algorithm} {key.body}\n"
        for entry in entries
        for key in entry.keys
    ]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(lines)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _algorithm_of(body: str) -> str | None:
    """The algorithm that a key's base64 body names (RFC 4253, 6.6: a 4-byte length, then the name)."""
    try:
        raw = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        return None
    size = int.from_bytes(raw[:4], "big")
    return raw[4 : 4 + size].decode("ascii", "replace") if 0 < size < len(raw) - 4 else None
