from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micsctl.aws.network import free_block
from micsctl.errors import MicsctlError

VPC = "10.77.0.0/16"
blocks = st.lists(st.integers(0, 15).map(lambda place: f"10.77.{16 * place}.0/20"), unique=True)


@given(taken=blocks, avoid=blocks)
def test_a_block_overlaps_nothing_taken_and_avoids_others_if_it_can(taken: list[str], avoid: list[str]) -> None:
    if len(taken) == 16:
        with pytest.raises(MicsctlError):
            free_block(VPC, taken, avoid)
        return
    block = ipaddress.ip_network(free_block(VPC, taken, avoid))
    assert block.subnet_of(ipaddress.ip_network(VPC))  # type: ignore[type-var]
    assert not any(block.overlaps(ipaddress.ip_network(one)) for one in taken)
    if len(set(taken) | set(avoid)) < 16:
        assert not any(block.overlaps(ipaddress.ip_network(one)) for one in avoid)


def test_blocks_of_other_sizes_are_respected() -> None:
    assert free_block(VPC, ["10.77.0.0/18", "10.77.64.128/25"], []) == "10.77.80.0/20"
