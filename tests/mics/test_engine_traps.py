"""Mistakes that train on wrong numbers without an error; each test fails when its guard is removed.

(Trap 5, a flat ring on the permuted order, is in test_engine_traffic.py.)
"""

import pytest
import torch
import torch.distributed as dist
from mics.sharding import ReplicaMismatchError, abort, apply, boundary, check_replicas, clip, connect
from mics.topology import RankGrid
from torch import nn
from torch.distributed.fsdp import FSDPModule

RANKS, WIDTH = 8, 8


class Fork(nn.Module):
    """`side` takes part only when asked to. The others come before and after it in the reduce buffer."""

    def __init__(self):
        super().__init__()
        self.before, self.side, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, use_side):
        x = self.before(x).tanh()
        if use_side:
            x = x + self.side(x)
        return self.after(x)


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Fork() for _ in range(2))

    def forward(self, x, use_side):
        for block in self.blocks:
            x = block(x, use_side)
        return x.square().sum()


def forks(seed=0):
    torch.manual_seed(seed)
    return Forks().double()


def input_of(micro, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * micro + rank), dtype=torch.float64)


def full_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def reference_gradients(use_side, micro_steps=3):
    model = forks()
    for micro in range(micro_steps):
        for rank in range(RANKS):
            model(input_of(micro, rank), use_side(micro, rank)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sharded(p, k, hierarchical=False, seed=0):
    connection = connect(RankGrid(RANKS, k, p, hierarchical=hierarchical))
    model = forks(seed)
    return apply(model, connection, blocks=model.blocks), connection


def accumulate(model, use_side, micro_steps=3):
    for micro in range(micro_steps):
        with boundary(model, last=micro == micro_steps - 1):
            model(input_of(micro, dist.get_rank()), use_side(micro, dist.get_rank())).backward()


def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def always(micro, rank):
    return True


def sometimes(micro, rank):
    """Differs between the micro-steps of a rank, and between the ranks of a micro-step."""
    return (micro + rank // 2) % 2 == 1


def only_first(micro, rank):
    return micro == 0


def sorted_groups():
    new_group = dist.new_group
    dist.new_group = lambda ranks, **options: new_group(ranks, **{**options, "sort_ranks": True})
    try:
        return refusal(connect, RankGrid(RANKS, 2, 4, hierarchical=True))
    finally:
        dist.new_group = new_group


def unused_parameter(use_side, p, k):
    model, _ = sharded(p, k)
    accumulate(model, use_side)
    return full_gradients(model)


class Stop(Exception):
    pass


def stop(gradient):
    raise Stop


def breaking(module, args, output):
    """Forward hook: the backward pass stops when it gets to this output."""
    output.register_hook(stop)


def after_abort(p):
    """Gradients of a whole step after: two micro-steps given up, and a backward that broke in the middle of a block."""
    model, _ = sharded(p, 2)
    for micro in range(2):
        with boundary(model, last=False):
            model(input_of(7 + micro, dist.get_rank()), True).backward()
    abort(model)
    accumulate(model, always)
    given_up = full_gradients(model)

    abort(model)
    with boundary(model, last=False):
        model(input_of(7, dist.get_rank()), True).backward()
    with boundary(model, last=False):
        break_before = model.blocks[1].before.register_forward_hook(breaking)
        loss = model(input_of(8, dist.get_rank()), True)
        break_before.remove()
        try:
            loss.backward()
        except Stop:
            abort(model)
        else:
            raise AssertionError("the backward pass did not break")
    accumulate(model, always)
    return given_up, full_gradients(model)


def after_validation(reshard, clean):
    """Gathers of the first step after two forward passes without backward, its gradients, and gathers of the next."""
    connection = connect(RankGrid(RANKS, 2, 4))
    model = forks()
    apply(model, connection, blocks=model.blocks, reshard=reshard)
    with torch.no_grad():
        for _ in range(2):
            model(input_of(9, dist.get_rank()), True)
    if clean:
        abort(model)
    gathers = []
    for _ in range(2):
        connection.meter.take()
        model.zero_grad()
        accumulate(model, always)
        counts = connection.meter.take()
        gathers.append(counts["gather_across"].calls)
    return gathers, full_gradients(model)


def different_replicas():
    """Rank-dependent weights: by grid, what check_replicas says before and after one replica is changed."""
    said = {}
    for p, k in ((1, 2), (2, 2), (4, 2)):
        model, connection = sharded(p, k)
        said[p, k] = [refusal(check_replicas, model, connection)]
        if dist.get_rank() // p == 1:  # one element of one shard of one replica
            with torch.no_grad():
                weight = model.blocks[1].after.weight.to_local()
                if dist.get_rank() % p == p - 1:
                    weight.view(-1)[-1].add_(1e-12)
        said[p, k].append(refusal(check_replicas, model, connection))
    model, connection = sharded(8, 2, hierarchical=True)
    said["one replica"] = [refusal(check_replicas, model, connection)]
    seeded, connection = sharded(2, 2, seed=dist.get_rank() // 2)
    said["seeds"] = [refusal(check_replicas, seeded, connection)]
    return said


def last_backward_calls():
    calls, original = [], FSDPModule.set_is_last_backward
    FSDPModule.set_is_last_backward = lambda self, last: calls.append(last)
    model, _ = sharded(4, 2)
    accumulate(model, always)
    FSDPModule.set_is_last_backward = original
    return calls


def spring_traps():
    return {
        "sorted": sorted_groups(),
        "sometimes": [unused_parameter(sometimes, p, k) for p, k in ((2, 2), (4, 2), (8, 4))],
        "only_first": [unused_parameter(only_first, p, k) for p, k in ((2, 2), (8, 4))],
        "abort": [after_abort(4), after_abort(8)],
        "validation": {
            (reshard, clean): after_validation(reshard, clean) for reshard in (True, "step") for clean in (True, False)
        },
        "replicas": different_replicas(),
        "last_backward": last_backward_calls(),
        "world": refusal(connect, RankGrid(4, 2, 2)),
        "not sharded": refusal(abort, nn.Linear(1, 1)),
    }


@pytest.fixture(scope="module")
def sprung(run_ranks):
    return run_ranks(spring_traps)


def assert_equal_gradients(mine, expected):
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.distributed
def test_1_sorted_ranks_are_refused(sprung):
    for rank in range(RANKS):
        group = (0, 2, 1, 3) if rank < 4 else (4, 6, 5, 7)
        expected = f"RuntimeError: torch ordered the process group {tuple(sorted(group))}, the rank grid needs {group}"
        assert sprung[rank]["sorted"] == expected


@pytest.mark.distributed
@pytest.mark.parametrize("use_side", [sometimes, only_first])
def test_2_parameter_without_gradient_in_some_micro_steps(use_side, sprung):
    expected = reference_gradients(use_side)
    for rank in range(RANKS):
        for mine in sprung[rank][use_side.__name__]:
            assert_equal_gradients(mine, expected)


@pytest.mark.distributed
def test_3_aborted_accumulation_leaves_nothing(sprung):
    expected = reference_gradients(always)
    for rank in range(RANKS):
        for given_up, broken in sprung[rank]["abort"]:
            assert_equal_gradients(given_up, expected)
            assert_equal_gradients(broken, expected)


@pytest.mark.distributed
@pytest.mark.parametrize("reshard", [True, "step"])
def test_validation_leaves_nothing_after_abort(reshard, sprung):
    """Without it the numbers are right as well, but FSDP2 gathers too much or, of weights it still has, too little."""
    expected = reference_gradients(always)
    for rank in range(RANKS):
        (first, later), gradients = sprung[rank]["validation"][reshard, True]
        assert first == later
        assert_equal_gradients(gradients, expected)
        (first, later), gradients = sprung[rank]["validation"][reshard, False]
        assert first != later
        assert_equal_gradients(gradients, expected)


@pytest.mark.distributed
def test_4_different_replicas_are_refused_on_every_rank(sprung):
    for rank in range(RANKS):
        said = sprung[rank]["replicas"]
        for cell in ((1, 2), (2, 2), (4, 2)):
            before, after = said[cell]
            assert before is None
            assert after.startswith(f"{ReplicaMismatchError.__name__}: the replicas hold different weights in 1 of 12")
            assert "blocks.1.after.weight" in after
        assert said["one replica"] == [None]
        assert "in 12 of 12 parameters, first blocks.0.before.weight" in said["seeds"][0]


@pytest.mark.distributed
def test_boundary_leaves_the_last_backward_flag_alone(sprung):
    assert sprung[0]["last_backward"] == []


@pytest.mark.distributed
def test_refusals_name_the_mistake(sprung):
    assert sprung[0]["world"] == "ValueError: the grid is for 4 ranks, the process group has 8"
    assert sprung[0]["not sharded"] == "TypeError: Linear is not sharded; call mics.apply on it first"


def test_one_device_alone():
    """n = p = 1: nothing to gather, nothing to reduce, the same calls."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        connection = connect(RankGrid(1, 1, 1))
        model = forks()
        apply(model, connection, blocks=model.blocks)
        accumulate(model, always)
        check_replicas(model, connection)
        norm = clip(model, 1e9)
        mine, counts = full_gradients(model), connection.meter.take()
    finally:
        dist.destroy_process_group()
    alone = forks()
    for micro in range(3):
        alone(input_of(micro, 0), True).backward()
    assert_equal_gradients(mine, {name: p.grad for name, p in alone.named_parameters()})
    assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item())
    assert all(count.calls == 0 for count in counts.values())
