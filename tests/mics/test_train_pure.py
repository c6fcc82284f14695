"""The trainer's pure parts: model, paths, places."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.config import LimitsConfig
from mics.errors import RunRefusedError
from mics.init import key_of, materialise
from mics.models.gpt import IGNORED, build_on_meta, summed_loss
from mics.paths import on_this_node
from mics.ranks import Place, check_place, collective_timeout, node_names, place_of
from mics.shapes import PRESETS, ModelShape
from mics.train import due
from torch.nn import functional


def tiny_model(seed=0, **shape):
    model = build_on_meta(
        ModelShape(**{"hidden": 12, "layers": 2, "heads": 3, "positions": 16, **shape}), torch.float64
    )
    materialise(model, model.fill, seed=seed, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_the_planner_counts(name):
    model = build_on_meta(PRESETS[name], torch.float32)
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    for block in model.blocks:
        assert sum(p.numel() for p in block.parameters()) == PRESETS[name].block_parameters


@settings(deadline=None, max_examples=20)
@given(
    heads=st.integers(1, 4),
    width=st.integers(1, 5),
    layers=st.integers(1, 3),
    ffn=st.integers(0, 9),
    vocabulary=st.integers(1, 300),
)
def test_any_shape_has_the_parameters_that_the_planner_counts(heads, width, layers, ffn, vocabulary):
    shape = ModelShape(heads * width, layers, heads, vocabulary, ffn)
    assert sum(p.numel() for p in build_on_meta(shape, torch.float32).parameters()) == shape.parameters


def test_the_model_does_not_look_ahead():
    model, ids = tiny_model(), torch.randint(256, (2, 16))
    changed = ids.clone()
    changed[:, 9] += 1
    before, after = model(ids), model(changed % 256)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-14)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-9


def test_the_head_is_the_token_embedding():
    model = tiny_model()
    assert "head.weight" not in dict(model.named_parameters())
    summed_loss(model, torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 7)).backward()
    assert model.tokens.weight.grad[7].abs().sum() > 0  # never an input: reached through the head only


def test_the_loss_sums_over_valid_targets_only():
    model, ids = tiny_model(), torch.randint(256, (2, 8))
    targets = torch.randint(256, (2, 8))
    targets[0, 3:] = IGNORED
    each = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(summed_loss(model, ids, targets), each.sum())
    assert (each != 0).sum() == 11


def test_weights_are_keyed_by_seed_and_name():
    weights = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    again = dict(tiny_model().named_parameters())
    other = dict(tiny_model(seed=1).named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["tokens.weight"], other["tokens.weight"])
    assert not torch.equal(weights["blocks.0.attention.qkv.weight"], weights["blocks.1.attention.qkv.weight"])
    # A deeper model does not change the weights that it shares with a shallow one, where the rule has no depth in it.
    assert torch.equal(dict(tiny_model(layers=5).named_parameters())["tokens.weight"], weights["tokens.weight"])
    assert key_of(0, "1:a") != key_of(0, "a") != key_of(1, "a")


def test_a_checkpoint_is_due_every_so_often_and_at_the_end():
    assert [step for step in range(1, 8) if due(step, every=3, last=step == 7)] == [3, 6, 7]
    assert not due(7, every=0, last=True)


@pytest.mark.parametrize(
    ("path", "shared", "expected"),
    [
        ("/fsx/demo", "/tmp/shared", "/tmp/shared/demo"),
        ("/fsx", "/tmp/shared", "/tmp/shared"),
        ("/fsx2/demo", "/tmp/shared", "/fsx2/demo"),
        ("/data/fsx", "/tmp/shared", "/data/fsx"),
        ("/fsx/demo", "", "/fsx/demo"),
        ("/fsx/demo", None, "/fsx/demo"),
    ],
)
def test_fsx_is_what_the_environment_says(path, shared, expected):
    assert on_this_node(path, {} if shared is None else {"MICS_SHARED": shared}) == expected


def test_a_place_comes_from_torchrun_and_must_fit_the_run():
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    place = place_of(environment)
    assert place == Place(5, 1, 8, 2)
    assert place.node == 2
    check_place(place, nodes=4, devices_per_node=2)
    with pytest.raises(RunRefusedError, match="2 nodes x 4 devices = 8 processes, torchrun started 8 with 2 on this"):
        check_place(place, nodes=2, devices_per_node=4)
    with pytest.raises(RunRefusedError, match="'WORLD_SIZE' is not set"):
        place_of({"RANK": "0", "LOCAL_RANK": "0"})


def test_ranks_have_the_names_of_their_nodes(tiny_run):
    run = tiny_run(nodes=3, devices=2)
    assert node_names(run) == ("node 0", "node 0", "node 1", "node 1", "node 2", "node 2")
    ordered = replace(run, node_order=(2, 0, 1), node_names=("i-0", "i-1", "i-2"))
    assert node_names(ordered) == ("i-2", "i-2", "i-0", "i-0", "i-1", "i-1")


def test_collectives_outlast_the_watchdog():
    limits = LimitsConfig(first_step_seconds=100, step_seconds=700)
    assert collective_timeout(limits).total_seconds() > 700
