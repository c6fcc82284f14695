"""What is compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.entries import PEERS, BenchConfig, Entry, grid_of
from mics.shapes import ModelShape

from micsctl.bench import cells
from micsctl.errors import UsageError

machines = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 8]))


def named(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


def test_rows_of_the_default_sandbox() -> None:
    rows = cells.strategies(cells.KNOWN, world_size=8, devices_per_node=2, on_cpu=True)
    assert [(e.strategy, e.partition_size, e.hierarchical, e.reduce_scatter) for e in rows] == [
        ("mics", 2, False, "ring"), ("mics", 2, False, "ring"), ("mics", 4, True, "ring"),
        ("mics-flat", 4, False, "ring"),
        ("zero3", 8, False, "ring"), ("zero3", 8, False, "native"), ("zero3", 8, False, "direct"),
        ("zero2", 8, False, "ring"), ("ddp", 1, False, "ring"),
        ("fsdp2", 8, False, "native"), ("fsdp2-hsdp", 2, False, "native"),
        ("deepspeed-zero3", 8, False, "native"), ("deepspeed-zero3", 8, False, "native"),
        ("deepspeed-hpz", 8, False, "native"),
    ]  # fmt: skip
    labels = [cells.label(entry) for entry in rows]
    assert labels.count("mics") == 2  # p = k and p = 2k; the third is named for what is unusual about it
    assert "mics, hop 2 every micro-step" in labels
    assert "deepspeed-zero3, second gather" in labels


@given(machines, st.booleans())
def test_every_entry_is_possible_and_has_a_name_of_its_own(shape: tuple[int, int], on_cpu: bool) -> None:
    nodes, k = shape
    for entries in (
        cells.strategies(cells.KNOWN, world_size=nodes * k, devices_per_node=k, on_cpu=on_cpu),
        cells.traffic(cells.KNOWN, world_size=nodes * k, devices_per_node=k, on_cpu=on_cpu),
        cells.crossover(world_size=nodes * k, devices_per_node=k),
    ):
        BenchConfig(entries)  # refuses names that are there twice
        for entry in entries:
            grid_of(entry, nodes=nodes, devices_per_node=k)
        if not on_cpu:  # GPUs have one reduce-scatter
            assert {entry.reduce_scatter for entry in entries} == {"ring"}


def test_traffic_has_every_partition_size_in_both_forms_and_two_numbers_of_micro_steps() -> None:
    found = cells.traffic(("mics", "mics-flat"), world_size=8, devices_per_node=2, on_cpu=True)
    assert {(e.strategy, e.partition_size, e.hierarchical, e.micro_steps) for e in found} == {
        *(("mics", p, p > 2, s) for p in (1, 2, 4, 8) for s in (1, 4)),
        *(("mics-flat", p, False, s) for p in (4, 8) for s in (1, 4)),
    }


def test_shapes_keep_the_number_of_ranks() -> None:
    assert cells.shapes(4, None) == ((8, 1), (4, 2), (2, 4))
    assert cells.shapes(2, None) == ((4, 1), (2, 2))
    assert cells.shapes(3, 2) == ((3, 2),)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cells.chosen("mics,zero"), "did you mean 'zero"),
        (lambda: cells.chosen("mics,,zero3"), "known: mics"),
        (lambda: cells.sizes("1,2,8", most=4), "there are 1 to 4 nodes"),
        (lambda: cells.sizes("0,2", most=4), "there are 1 to 4 nodes"),
        (lambda: cells.sizes("7,11,13", most=64), "7 nodes would make 143 micro-steps"),
        (lambda: cells.sizes("one", most=4), "'one' is no number of nodes"),
        (lambda: cells.link_rates("100,0"), "rates are 1 to"),
        (lambda: cells.link_rates("fast"), "'fast' is no link rate"),
    ],
)
def test_bad_words_are_explained(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as error:
        call()
    assert words in f"{error.value.what} {error.value.why}"


def test_what_is_left_out_is_said() -> None:
    every = {"precision": "fp16", "with_deepspeed": True}
    assert set(cells.refused(cells.KNOWN, **every)) == set(PEERS)  # type: ignore[arg-type]
    gone = cells.refused(cells.KNOWN, precision="fp32", with_deepspeed=False)
    assert set(gone) == {"deepspeed-zero3", "deepspeed-hpz"}
    assert cells.refused(cells.KNOWN, precision="bf16", with_deepspeed=True) == {}
    for nodes, k, names in (
        (3, 2, ("mics-flat", "mics at p = 4")),
        (4, 1, ("fsdp2-hsdp", "deepspeed-hpz")),
        (4, 2, ()),
    ):
        shape = {"world_size": nodes * k, "devices_per_node": k}
        found = cells.missing(cells.KNOWN, cells.strategies(cells.KNOWN, **shape, on_cpu=True), **shape)
        assert [line.split(":")[0] for line in found] == list(names)


def test_good_words() -> None:
    assert cells.chosen(None) == cells.KNOWN
    assert cells.chosen("zero3, mics,zero3") == ("zero3", "mics")
    assert cells.sizes("8,1,2,2", most=8) == (1, 2, 8)
    assert cells.link_rates("400, 100") == (400, 100)


def test_the_model_of_bench_traffic_has_no_small_matrix() -> None:
    model = cells.TRAFFIC_MODEL
    assert min(model.hidden, model.vocabulary, model.positions) * model.hidden >= 1e5


def test_the_model_of_bench_scaling_has_many_blocks_and_a_small_root() -> None:
    model = cells.SCALING_MODEL
    assert round(model.parameters / 1e6, 1) == 3.1
    assert model.root_parameters < 0.02 * model.parameters


def test_the_default_model_has_equal_blocks_and_a_small_root() -> None:
    model = cells.DEFAULT_MODEL
    assert isinstance(model, ModelShape)
    assert round(model.parameters / 1e6, 1) == 16.8
    assert model.root_parameters < 0.01 * model.parameters
