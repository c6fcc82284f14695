from __future__ import annotations

import base64
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micsctl.cluster.model import Cluster, Node
from micsctl.remote.hostkeys import HostKey, KnownHost, known_hosts_of, parse_console, write_known_hosts


def key(algorithm: str, seed: bytes = b"x") -> HostKey:
    raw = len(algorithm).to_bytes(4, "big") + algorithm.encode() + len(seed).to_bytes(4, "big") + seed
    return HostKey(algorithm, base64.b64encode(raw).decode())


ED, RSA, EC = key("ssh-ed25519"), key("ssh-rsa", b"y" * 300), key("ecdsa-sha2-nistp256")
BARE = f"""boot ...
-----BEGIN SSH HOST KEY KEYS-----
{EC.algorithm} {EC.body} root@ip-10-0-0-1
{ED.algorithm} {ED.body} root@ip-10-0-0-1
{RSA.algorithm} {RSA.body}
-----END SSH HOST KEY KEYS-----
"""
LOGGED = f"""
<14>Jan  1 00:00:01 ec2: -----BEGIN SSH HOST KEY FINGERPRINTS-----\r
<14>Jan  1 00:00:01 ec2: 256 SHA256:abc root@ip (ED25519)\r
<14>Jan  1 00:00:01 ec2: -----END SSH HOST KEY FINGERPRINTS-----\r
-----BEGIN SSH HOST KEY KEYS-----\r
<14>Jan  1 00:00:01 ec2: {EC.algorithm} {EC.body} root@ip-10-0-0-1\r
[   12.5] cloud-init[99]: {ED.algorithm} {ED.body}\r
-----END SSH HOST KEY KEYS-----\r
"""


def test_both_styles() -> None:
    assert parse_console(BARE) == [EC, ED, RSA]
    assert parse_console(LOGGED) == [EC, ED]


def test_nothing_before_the_block_is_whole() -> None:
    assert parse_console("") == []
    assert parse_console(BARE[: BARE.index("-----END")]) == []


def test_keys_outside_the_markers_do_not_count() -> None:
    assert parse_console(f"{ED.algorithm} {ED.body}\n{LOGGED}\n{RSA.algorithm} {RSA.body}") == [EC, ED]


def test_the_last_boot_counts() -> None:
    other = key("ssh-ed25519", b"after a reboot")
    assert parse_console(BARE + BARE.replace(ED.body, other.body)) == [EC, other, RSA]


def test_a_damaged_key_is_left_out() -> None:
    cut = BARE.replace(RSA.body, RSA.body[:13])
    assert parse_console(cut) == [EC, ED]
    assert parse_console(BARE.replace("ssh-rsa", "ssh-dss")) == [EC, ED]


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert parse_console(text) == []
    parse_console(f"-----BEGIN SSH HOST KEY KEYS-----{text}-----END SSH HOST KEY KEYS-----")


@given(st.lists(st.sampled_from([ED, RSA, EC]), unique=True), st.sampled_from(["", "<14>x ec2: ", "[ 1.0] "]))
def test_every_printed_key_is_found(keys: list[HostKey], prefix: str) -> None:
    lines = "".join(f"{prefix}{k.algorithm} {k.body} root@x\r\n" for k in keys)
    text = f"{prefix}-----BEGIN SSH HOST KEY KEYS-----\r\n{lines}{prefix}-----END SSH HOST KEY KEYS-----\r\n"
    assert parse_console(text) == keys


def test_known_hosts_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "known_hosts"
    write_known_hosts(path, [KnownHost("10.0.0.1", 22, (ED, EC)), KnownHost("127.77.0.1", 2222, (RSA,))])
    assert path.read_text().splitlines() == [
        f"10.0.0.1 {ED.algorithm} {ED.body}",
        f"10.0.0.1 {EC.algorithm} {EC.body}",
        f"[127.77.0.1]:2222 {RSA.algorithm} {RSA.body}",
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["known_hosts"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    write_known_hosts(path, [KnownHost("10.0.0.1", 22, (ED,))])
    with pytest.raises(UnicodeEncodeError):
        write_known_hosts(path, [KnownHost("10.0.0.1", 22, (HostKey("ssh-ed25519", "ö"),))])
    assert ED.body in path.read_text()
    assert os.listdir(tmp_path) == ["known_hosts"]


def test_both_addresses_of_a_node_are_known() -> None:
    nodes = (Node(0, "i-0", "running", "10.0.0.1", "203.0.113.9"), Node(1, "i-1", "running", "10.0.0.2", None))
    now = datetime.now(UTC)
    cluster = Cluster("c", "aws", "us-east-1", "us-east-1a", "p4d.24xlarge", "ubuntu", 22, now, now, nodes)
    assert known_hosts_of(cluster, {"i-0": [ED], "i-1": [RSA]}) == [
        KnownHost("10.0.0.1", 22, (ED,)),
        KnownHost("203.0.113.9", 22, (ED,)),
        KnownHost("10.0.0.2", 22, (RSA,)),
    ]
