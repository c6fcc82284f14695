"""The memory formula against the paper's partition sizes, against allocated bytes, and against arithmetic by hand."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.config import Precision
from mics.shapes import PRESETS, ModelShape

from micsctl.planner.memory import estimate

GPT_3M = PRESETS["gpt-3m"]

# hidden, layers, heads of the BERT models in the MiCS paper's runs, their vocabulary of 32008 and sequence of 512
BERT = {
    "10B": ModelShape(hidden=2560, layers=127, heads=40, vocabulary=32008, positions=512),
    "15B": ModelShape(hidden=2560, layers=190, heads=40, vocabulary=32008, positions=512),
    "20B": ModelShape(hidden=5120, layers=64, heads=40, vocabulary=32008, positions=512),
    "50B": ModelShape(hidden=8192, layers=62, heads=64, vocabulary=32008, positions=512),
}

shapes = st.builds(
    lambda width, heads, **rest: ModelShape(hidden=width * heads, heads=heads, **rest),
    width=st.sampled_from((8, 64, 128)),
    heads=st.integers(1, 64),
    layers=st.integers(1, 100),
    vocabulary=st.integers(2, 100_000),
    ffn=st.sampled_from((0, 64, 4096)),
    positions=st.sampled_from((128, 2048)),
)
precisions = st.sampled_from(get_args(Precision))
devices = st.sampled_from(("cpu", "A100"))


@pytest.mark.parametrize(
    ("name", "predicted_gb", "smallest"),
    [
        ("10B", (28.8, 18.1, 12.8, 10.1), 8),
        ("15B", (40.7, 24.8, 16.8, 12.8), 16),
        ("20B", (53.3, 31.8, 21.0, 15.6), 16),
        ("50B", (124.4, 71.1, 44.5, 31.2), 64),
    ],
)
def test_smallest_partition_size_on_a_v100_is_the_paper_s(
    name: str, predicted_gb: tuple[float, ...], smallest: int
) -> None:
    sizes = (8, 16, 32, 64)
    total_gb = {
        p: estimate(
            BERT[name],
            partition_size=p,
            micro_batch=8,
            sequence=512,
            precision="bf16",
            device="V100",
            checkpointing="full",
            flash=False,
            dropout=True,
        ).total
        / 1e9
        for p in sizes
    }
    # The tied head's gradient, held through the backward pass, is not in the published arithmetic: up to 0.6 GB.
    assert tuple(total_gb.values()) == pytest.approx(predicted_gb, abs=0.65)
    assert min(p for p in sizes if total_gb[p] <= 34.1) == smallest


@pytest.mark.parametrize(
    ("model", "precision", "p", "micro_batch", "sequence", "allocated_mb"),
    [
        ("gpt-3m", "fp32", 1, 1, 128, 70.6),
        ("gpt-3m", "fp32", 2, 1, 128, 47.7),
        ("gpt-3m", "fp32", 2, 4, 128, 72.4),
        ("gpt-3m", "fp32", 2, 8, 128, 108.5),
        ("gpt-3m", "fp32", 4, 4, 128, 59.1),
        ("gpt-3m", "bf16", 1, 4, 128, 76.7),
        ("gpt-3m", "bf16", 2, 4, 128, 50.9),
        ("gpt-17m", "fp32", 2, 4, 256, 341.1),
        ("gpt2-124m", "fp32", 2, 1, 128, 1650.8),
        ("gpt2-124m", "bf16", 2, 2, 512, 2001.4),
    ],
)
def test_agrees_with_the_bytes_that_fsdp2_allocated(
    model: str, precision: Precision, p: int, micro_batch: int, sequence: int, allocated_mb: float
) -> None:
    """Measured once: the largest `mallinfo2` over all operators of the later steps of an FSDP2 loop (torch 2.13, CPU,
    gloo, fused AdamW, two micro-steps), less what the process held before the model."""
    memory = estimate(
        PRESETS[model], partition_size=p, micro_batch=micro_batch, sequence=sequence, precision=precision, device="cpu"
    )
    assert memory.total / 1e6 == pytest.approx(allocated_mb, rel=0.07)


def test_gpt_3m_in_fp32_by_hand() -> None:
    memory = estimate(GPT_3M, partition_size=2, micro_batch=1, sequence=128, precision="fp32", device="cpu")
    assert memory.states == 8 * 3_290_624
    assert memory.working_set == 16 * 789_760 + 8 * 131_584
    assert memory.activations == 4 * 128 * 4 * (8 * 256 + 2 * 1024)
    assert (memory.loss, memory.overhead) == (0, 0)


def test_without_shards_nothing_is_gathered_but_the_block_in_use_is_copied() -> None:
    alone = estimate(GPT_3M, partition_size=1, micro_batch=1, sequence=128, precision="fp32", device="cpu")
    assert alone.working_set == 12 * 789_760 + 8 * 131_584


@pytest.mark.parametrize(("flash", "scores"), [(True, 0), (False, 5)])
def test_activations_are_those_of_korthikanti(flash: bool, scores: int) -> None:
    """s b h (34 + 5 a s / h) bytes per layer in 16 bit with dropout, 34 s b h without the scores."""
    shape = ModelShape(hidden=1024, layers=3, heads=16, positions=512)
    memory = estimate(
        shape,
        partition_size=8,
        micro_batch=4,
        sequence=512,
        precision="bf16",
        device="cpu",
        flash=flash,
        dropout=True,
    )
    assert memory.activations == pytest.approx(3 * 512 * 4 * 1024 * (34 + scores * 16 * 512 / 1024))


def test_a_large_vocabulary_moves_the_peak_to_the_loss() -> None:
    shape = ModelShape(hidden=64, layers=1, heads=1, vocabulary=50_000)
    memory = estimate(shape, partition_size=1, micro_batch=8, sequence=1024, precision="bf16", device="cpu")
    assert memory.loss == 8 * 1024 * 50_000 * 10
    assert memory.working_set == 8 * shape.root_parameters


@given(shape=shapes, precision=precisions, device=devices, p=st.integers(1, 512), micro_batch=st.integers(1, 16))
def test_memory_falls_with_p_and_grows_with_the_micro_batch(
    shape: ModelShape, precision: Precision, device: str, p: int, micro_batch: int
) -> None:
    def total(p: int, micro_batch: int) -> float:
        return estimate(
            shape, partition_size=p, micro_batch=micro_batch, sequence=128, precision=precision, device=device
        ).total

    here = total(p, micro_batch)
    assert total(2 * p, micro_batch) < here
    assert total(p, micro_batch + 1) > here


@given(shape=shapes, precision=precisions, p=st.integers(1, 512), micro_batch=st.integers(1, 16))
def test_a_gpu_costs_a_reserve_and_checkpointing_never_costs_memory_of_more_than_a_block(
    shape: ModelShape, precision: Precision, p: int, micro_batch: int
) -> None:
    common = {"partition_size": p, "micro_batch": micro_batch, "sequence": 128, "precision": precision}
    cpu, gpu = (estimate(shape, **common, device=device) for device in ("cpu", "H100"))  # type: ignore[arg-type]
    assert gpu.total == pytest.approx(1.06 * cpu.total + 2.5e9)
    full = estimate(shape, **common, device="cpu", checkpointing="full")  # type: ignore[arg-type]
    one_block = cpu.activations / shape.layers
    assert full.total <= cpu.total + one_block
    if shape.layers > 1:
        assert full.activations < cpu.activations
