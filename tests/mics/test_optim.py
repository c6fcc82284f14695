"""Schedules, parameter groups, and steps that are left out on the device."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mics.optim import adamw, learning_rate, optimizer_step, set_learning_rate
from mics.sharding import apply, connect
from mics.topology import RankGrid
from torch import nn


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def test_matrices_decay_norms_and_biases_do_not_and_frozen_parameters_are_left_out():
    model = model_of()
    model[2].requires_grad_(False)
    decayed, others = adamw(model, lr=1e-3, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [list(p.shape) for p in decayed["params"]] == [[7, 5]]
    assert [list(p.shape) for p in others["params"]] == [[7], [7], [7]]


@given(
    st.integers(0, 50),
    st.integers(1, 200),
    st.floats(1e-6, 1.0),
    st.sampled_from(["cosine", "wsd"]),
    st.integers(0, 99),
)
def test_schedules_warm_up_to_the_peak_and_fall_to_a_tenth(warmup, steps, peak, schedule, decay):
    settings = {"peak": peak, "warmup": warmup, "steps": steps, "schedule": schedule, "decay": decay}
    rates = [learning_rate(step, **settings) for step in range(steps)]
    rise, fall = rates[:warmup], rates[warmup:]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    if 0 < warmup <= steps:
        assert math.isclose(rates[warmup - 1], peak)
    if steps > warmup:
        assert math.isclose(rates[-1], peak / 10)


@given(st.integers(0, 20), st.integers(1, 200), st.integers(0, 99))
def test_wsd_is_stable_up_to_its_last_steps_and_then_a_line(warmup, steps, decay):
    rates = [
        learning_rate(step, peak=1.0, warmup=warmup, steps=steps, schedule="wsd", decay=decay) for step in range(steps)
    ]
    last = min(decay or max(1, steps // 10), max(0, steps - warmup))
    stable, line = rates[warmup : steps - last], [1.0, *rates[steps - last :]]
    assert stable == pytest.approx([1.0] * len(stable))
    drops = [before - after for before, after in itertools.pairwise(line)]
    assert drops == pytest.approx([0.9 / max(1, last)] * last)


def test_the_schedules_in_numbers():
    rates = [learning_rate(step, peak=1.0, warmup=2, steps=6) for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)
    rates = [learning_rate(step, peak=1.0, warmup=2, steps=6, schedule="wsd", decay=3) for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.7, 0.4, 0.1])


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)().detach().clone()


def states(model, optimizer):
    """Weights, moments and step counts as plain tensors of their own."""
    kept = [local(p) for p in model.parameters()]
    return kept + [local(value) for state in optimizer.state.values() for value in state.values()]


def give_gradients(model, poison=False):
    model(torch.ones(2, 5, dtype=model[0].weight.dtype)).square().sum().backward()
    if poison:
        for p in model.parameters():
            local_grad = getattr(p.grad, "to_local", lambda p=p: p.grad)()
            local_grad.fill_(math.nan)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def skipping(model):
    """Whether each step did what it should: the first one left out, a real one, one left out, a real one."""
    optimizer = adamw(model, lr=0.1, weight_decay=0.1)
    outcomes = []
    for number, skip in enumerate((1.0, 0.0, 1.0, 0.0)):
        before = states(model, optimizer)
        give_gradients(model, poison=skip == 1.0)
        optimizer_step(optimizer, torch.tensor(skip))
        optimizer.zero_grad()
        after = states(model, optimizer)
        if number == 0:  # the moments came into being, all zero
            weights = len(list(model.parameters()))
            outcomes.append(same(before, after[:weights]) and not any(value.any() for value in after[weights:]))
        else:
            outcomes.append(same(before, after) == (skip == 1.0))
    return outcomes, states(model, optimizer)


def plainly(model):
    """Two steps that know nothing of skipping."""
    optimizer = adamw(model, lr=0.1, weight_decay=0.1)
    for _ in range(2):
        give_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return states(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_left_out_changes_nothing_and_the_others_are_plain_steps_bit_for_bit(dtype):
    outcomes, end = skipping(model_of(dtype))
    assert outcomes == [True] * 4
    assert same(end, plainly(model_of(dtype)))


def test_without_the_flag_the_poison_would_have_spread():
    model = model_of()
    optimizer = adamw(model, lr=0.1, weight_decay=0.1)
    give_gradients(model, poison=True)
    optimizer.step()
    assert all(p.isnan().all() for p in model.parameters())


def sharded_skipping():
    connection = connect(RankGrid(2, 2, 2))
    return [run(apply(model_of(), connection, blocks=[])) for run in (skipping, plainly)]


@pytest.mark.distributed
def test_the_same_holds_for_shards(run_ranks):
    for (outcomes, end), plain in run_ranks(sharded_skipping, ranks=2):
        assert outcomes == [True] * 4
        assert same(end, plain)


def test_the_learning_rate_reaches_every_group():
    optimizer = adamw(model_of(), lr=0.1, weight_decay=0.1)
    set_learning_rate(optimizer, 0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
