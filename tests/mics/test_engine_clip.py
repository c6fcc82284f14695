"""The norm and the scaling, with a loss scale, frozen parameters and ranks whose shards are all empty."""

import pytest
import torch
import torch.distributed as dist
from mics.sharding import apply, clip, connect
from mics.topology import RankGrid
from torch import nn

pytestmark = pytest.mark.distributed

RANKS = 4
CELLS = [(1, False), (2, False), (4, True)]  # (p, hierarchical), nodes of 2
KINDS = {
    "all": lambda name: True,
    "frozen": lambda name: name != "0.weight",
    "small": lambda name: name == "1.bias",  # 2 elements: the shards of most ranks are empty
    "nothing": lambda name: False,
}


def model_of(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(KINDS[kind](name))
    return model


def loss_of(model, factor):
    x = torch.linspace(-1, 1, 3, dtype=torch.float64)
    return model(x.view(1, 3).requires_grad_()).square().sum() * factor


def reference(kind, max_norm):
    model = model_of(kind)
    loss_of(model, RANKS).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def clipped(max_norm, scale):
    results = {}
    for p, hierarchical in CELLS:
        connection = connect(RankGrid(RANKS, 2, p, hierarchical=hierarchical))
        for kind in KINDS:
            model = model_of(kind)
            apply(model, connection, blocks=[model[0]])
            loss_of(model, scale or 1).backward()
            norm = clip(model, max_norm, scale=None if scale is None else torch.tensor(scale)).item()
            gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
            results[p, hierarchical, kind] = norm, gradients
    return results


def overflowing():
    """Norms where one gradient of one rank is not a number, then infinite: known to every rank."""
    norms = []
    model = model_of("all")
    apply(model, connect(RankGrid(RANKS, 2, 4)), blocks=[model[0]])
    for wrong in (torch.nan, torch.inf):
        loss_of(model, 1).backward()
        if dist.get_rank() == 0:  # the last rank has no element of it
            model[0].weight.grad.to_local().fill_(wrong)
        norms.append(clip(model, 1.0, scale=torch.tensor(4.0)).item())
        model.zero_grad()
    return norms


def rounded_otherwise():
    """The norm of a rank whose first replica's sum is off by one bit, as another order of additions would make it."""
    model = model_of("all")
    apply(model, connect(RankGrid(RANKS, 2, 2)), blocks=[model[0]])
    loss_of(model, 1).backward()
    if dist.get_rank() < 2:
        for parameter in model.parameters():
            local = parameter.grad.to_local()
            local.copy_(torch.nextafter(local, local + local.sign()))
    return clip(model, 1.0).item()


SETTINGS = [(0.01, None), (0.01, 1024.0), (1e6, 1024.0)]


def everything():
    return [clipped(*setting) for setting in SETTINGS], overflowing(), rounded_otherwise()


@pytest.fixture(scope="module")
def outcome(run_ranks):
    return run_ranks(everything, ranks=RANKS)


@pytest.mark.parametrize("setting", range(len(SETTINGS)), ids=["clipped", "scaled and clipped", "scaled"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_after_unscaling(setting, kind, outcome):
    norm, gradients = reference(kind, SETTINGS[setting][0])
    for settings, _, _ in outcome:
        for p, hierarchical in CELLS:
            my_norm, mine = settings[setting][p, hierarchical, kind]
            assert my_norm == pytest.approx(norm, rel=1e-6)
            assert mine.keys() == gradients.keys()
            for name, value in gradients.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-12)


def test_a_norm_that_is_not_finite_reaches_every_rank(outcome):
    for _, norms, _ in outcome:
        assert not any(torch.tensor(norms).isfinite())


def test_all_replicas_scale_by_the_same_bits(outcome):
    assert len({norm for _, _, norm in outcome}) == 1
