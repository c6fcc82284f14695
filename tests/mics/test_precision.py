"""The loss scale of fp16: halves on overflow, doubles after enough clean steps, and is 1 for everything else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mics.precision import FIRST_SCALE, GROW_AFTER, LossScale

CPU = torch.device("cpu")
CLEAN, OVERFLOWED = torch.tensor(0.0), torch.tensor(1.0)


def after(steps, precision="fp16"):
    scale = LossScale(precision, CPU)
    for overflowed in steps:
        scale.update(OVERFLOWED if overflowed else CLEAN)
    return scale


def test_it_halves_at_once_and_doubles_late():
    scale = after([True])
    assert scale.value == FIRST_SCALE / 2
    for _ in range(GROW_AFTER - 1):
        scale.update(CLEAN)
    assert scale.value == FIRST_SCALE / 2
    scale.update(CLEAN)
    assert scale.value == FIRST_SCALE
    scale.update(CLEAN)
    assert scale.value == FIRST_SCALE  # the count of clean steps began anew


def test_an_overflow_starts_the_count_anew():
    scale = after([False] * (GROW_AFTER - 1) + [True, False])
    assert scale.value == FIRST_SCALE / 2


def test_it_never_falls_below_one():
    assert after([True] * 100).value == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_are_not_scaled(precision):
    assert after([True, False, True], precision).value == 1


@given(st.lists(st.booleans(), max_size=50), st.lists(st.booleans(), max_size=50))
def test_a_restored_scale_goes_on_where_the_saved_one_was(before, later):
    saved, restored = after(before), LossScale("fp16", CPU)
    restored.load_state_dict({name: value.clone() for name, value in saved.state_dict().items()})
    for overflowed in later:
        saved.update(OVERFLOWED if overflowed else CLEAN)
        restored.update(OVERFLOWED if overflowed else CLEAN)
    assert saved.value == restored.value


def test_a_checkpoint_of_another_precision_does_not_switch_scaling_on():
    scale = LossScale("bf16", CPU)
    scale.load_state_dict(after([True]).state_dict())
    assert scale.value == 1
