"""What a benchmark compares, and the bytes that each entry sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.entries import PEERS, BenchConfig, Entry, grid_of, reshard_of_entry, traffic_bytes
from mics.strategies import STRATEGIES
from mics.topology import partition_sizes
from mics.traffic import per_step


def sent(entry: Entry, *, nodes: int, devices: int, block: float = 1.0, root: float = 0.0, **more: Any) -> float:
    return traffic_bytes(entry, nodes=nodes, devices_per_node=devices, block_bytes=block, root_bytes=root, **more)


@st.composite
def machines(draw: st.DrawFn) -> tuple[int, int, int]:
    """Nodes, devices on each, and a partition size that they can have."""
    nodes, devices = draw(st.integers(2, 6)), draw(st.integers(1, 8))
    return nodes, devices, draw(st.sampled_from(partition_sizes(nodes * devices, devices)))


@pytest.mark.parametrize(
    ("strategy", "p", "hierarchical", "reduce_scatter", "megabytes"),
    [
        ("zero3", 8, False, "ring", 705.5),
        ("zero3", 8, False, "native", 940.7),
        ("zero3", 8, False, "direct", 873.5),
        ("mics-flat", 4, False, "native", 839.9),
        ("mics-flat", 4, False, "direct", 705.5),
        ("mics", 4, True, "ring", 436.7),
        ("mics", 2, False, "ring", 100.8),
        ("zero2", 8, False, "ring", 294.0),
        ("ddp", 1, False, "ring", 117.6),
        ("fsdp2", 8, False, "native", 940.7),
        ("fsdp2-hsdp", 2, False, "native", 100.8),
        ("deepspeed-zero3", 8, False, "native", 705.5),
        ("deepspeed-hpz", 8, False, "native", 529.1),
    ],
)
def test_four_nodes_of_two_devices_and_67_mb_of_weights(
    strategy: str, p: int, hierarchical: bool, reduce_scatter: Any, megabytes: float
) -> None:
    entry = Entry("x", strategy, p, hierarchical, reduce_scatter)
    assert sent(entry, nodes=4, devices=2, block=67.19) == pytest.approx(megabytes, rel=1e-3)


def test_deepspeed_gathers_twice_where_it_is_forced_to_but_for_what_it_keeps() -> None:
    once, twice = (Entry("x", "deepspeed-zero3", 8, second_gather=second) for second in (False, True))
    assert sent(once, nodes=4, devices=2, block=8, root=8) == 4 * (14 + 28)
    assert sent(twice, nodes=4, devices=2, block=8, root=8) == 4 * (28 + 28)
    assert sent(twice, nodes=4, devices=2, block=8, root=8, kept_bytes=4) == 4 * (24.5 + 28)


@given(machines(), st.integers(1, 4), st.sampled_from(["mics", "mics-flat", "zero3", "zero2", "ddp"]), st.booleans())
def test_with_a_ring_ours_is_the_formula_of_the_engine(
    where: tuple[int, int, int], micro_steps: int, strategy: str, two_stages: bool
) -> None:
    nodes, devices, p = where
    p = {"zero3": nodes * devices, "zero2": nodes * devices, "ddp": 1}.get(strategy, p)
    entry = Entry("x", strategy, p, strategy == "mics" and two_stages and p > devices > 1, micro_steps=micro_steps)
    expected = per_step(
        grid_of(entry, nodes=nodes, devices_per_node=devices),
        block_bytes=20,
        root_bytes=4,
        block_gradient_bytes=40,
        root_gradient_bytes=8,
        micro_steps=micro_steps,
        reshard=reshard_of_entry(entry),
    )
    gradients = {"block_gradient_bytes": 40, "root_gradient_bytes": 8}
    assert sent(entry, nodes=nodes, devices=devices, block=20, root=4, **gradients) == pytest.approx(expected.total)


@given(machines(), st.integers(1, 4))
def test_order_of_the_schemes(where: tuple[int, int, int], micro_steps: int) -> None:
    nodes, devices, p = where

    def of(strategy: str, size: int, **more: Any) -> float:
        entry = Entry("x", strategy, size, micro_steps=micro_steps, **more)
        return sent(entry, nodes=nodes, devices=devices, block=20, root=4)

    n, slack = nodes * devices, 1 + 1e-9
    ring, direct, native = (of("mics-flat", p, reduce_scatter=kind) for kind in ("ring", "direct", "native"))
    assert ring <= direct * slack
    assert ring <= native * slack
    assert native == ring or p > devices
    if p > devices > 1:
        assert of("mics", p, hierarchical=True) < ring
    assert of("fsdp2", n) == of("zero3", n, reduce_scatter="native")
    if p < n:
        assert of("fsdp2-hsdp", p) == native
        every = of("fsdp2-hsdp", p, hop2_every_micro_step=True)
        assert every >= native
        assert every == pytest.approx(micro_steps * native) or p > devices
    once, twice = (of("deepspeed-zero3", n, second_gather=second) for second in (False, True))
    assert once < twice <= of("fsdp2", n) * 2
    if devices > 1:
        assert of("deepspeed-hpz", n) <= once * slack


@given(st.sampled_from(sorted({*STRATEGIES, *PEERS} - {"fsdp2-hsdp"})), st.integers(2, 8), st.integers(1, 4))
def test_nothing_leaves_a_single_node(strategy: str, devices: int, micro_steps: int) -> None:
    entry = Entry("x", strategy, 1 if strategy == "ddp" else devices, micro_steps=micro_steps)
    assert sent(entry, nodes=1, devices=devices) == 0


@given(machines())
def test_on_gpus_every_reduce_scatter_is_a_ring(where: tuple[int, int, int]) -> None:
    nodes, devices, p = where
    native = Entry("x", "mics-flat", p, reduce_scatter="native")
    ring = replace(native, reduce_scatter="ring")
    assert sent(native, nodes=nodes, devices=devices, on_cpu=False) == sent(ring, nodes=nodes, devices=devices)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry("x", "zero4", 8), "unknown strategy 'zero4'"),
        (Entry("x", "mics", 3), "does not divide"),
        (Entry("x", "zero3", 4), "fixes the partition size to 8"),
        (Entry("x", "fsdp2", 4), "fixes the partition size to 8"),
        (Entry("x", "fsdp2-hsdp", 8), "one replica only"),
        (Entry("x", "fsdp2-hsdp", 4, hierarchical=True), "is flat"),
        (Entry("x", "mics", 4, True, "direct"), "a hierarchical reduce-scatter is a ring"),
        (Entry("x", "mics", 4, reduce_scatter="tree"), "unknown reduce_scatter 'tree'"),  # type: ignore[arg-type]
        (Entry("x", "mics", 2, micro_steps=0), "micro_steps must be at least 1"),
        (Entry("x", "mics", 2, second_gather=True), "second_gather belongs to deepspeed-*"),
    ],
)
def test_what_eight_devices_cannot_have(entry: Entry, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        grid_of(entry, nodes=4, devices_per_node=2)


def test_hpz_needs_several_devices_on_a_node() -> None:
    with pytest.raises(ValueError, match="none to share"):
        grid_of(Entry("x", "deepspeed-hpz", 8), nodes=8, devices_per_node=1)


def test_bench_json_there_and_back() -> None:
    entries = (Entry("a", "zero3", 8), Entry("b", "mics", 4, True, micro_steps=2))
    config = BenchConfig(entries, together=False, emulated_compute_seconds=0.5)
    assert BenchConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "bench.json"),
        ("{}", "entries"),
        ('{"entries": []}', "different names"),
        ('{"entries": [{"name": "a"}]}', "strategy"),
        ('{"entries": [{"name": "a", "strategy": "ddp", "partition_size": 1}], "steps": 0}', "at least 1"),
        (
            '{"entries": [{"name": "a", "strategy": "ddp", "partition_size": 1}], "emulated_compute_seconds": -1}',
            "0 or",
        ),
        ("{", "Expecting"),
    ],
)
def test_a_bench_json_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BenchConfig.from_json(text)
