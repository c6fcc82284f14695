import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mics.init import materialise
from mics.models.built import IGNORED
from mics.models.transformer import build_transformer, rotate, summed_loss
from mics.shapes import PRESETS, ModelShape

FAMILIES = ("gpt", "bert", "llama")
EVERY_HEAD = pytest.mark.parametrize(
    ("family", "tied"), [(family, tied) for family in FAMILIES for tied in (True, False)]
)


def tiny_model(family="gpt", **shape):
    own = {"kv_heads": 2} if family == "llama" else {}
    sizes = {"hidden": 24, "layers": 2, "heads": 6, "vocabulary": 50, "positions": 16}
    model = build_transformer(ModelShape(**{**sizes, "family": family, **own, **shape}), torch.float64)
    materialise(model, model.fill, seed=0, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_that_the_planner_counts(name):
    shape, model = PRESETS[name], build_transformer(PRESETS[name], torch.float32)
    counts = {sum(p.numel() for p in block.parameters()) for block in model.blocks}
    assert counts == {shape.block_parameters}
    assert len(model.blocks) == shape.layers
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    assert all(p.is_meta for p in model.parameters())
    assert list(model.buffers()) == []  # one would lose its value on the meta device


@settings(max_examples=30)
@given(
    family=st.sampled_from(FAMILIES),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    width=st.integers(1, 3),
    layers=st.integers(1, 2),
    ffn=st.integers(0, 9),
    vocabulary=st.integers(1, 300),
    tied=st.booleans(),
)
def test_any_shape_has_the_parameters_that_the_planner_counts(
    family, groups, kv_heads, width, layers, ffn, vocabulary, tied
):
    heads, own = groups * kv_heads, {"kv_heads": kv_heads} if family == "llama" else {}
    shape = ModelShape(heads * 2 * width, layers, heads, vocabulary, ffn, family=family, tied=tied, **own)
    model = build_transformer(shape, torch.float32)  # refuses a difference in the sum
    assert sum(p.numel() for p in model.blocks[0].parameters()) == shape.block_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_does_not_look_ahead_and_an_encoder_does(family):
    model, ids = tiny_model(family), torch.randint(50, (2, 16))
    changed = ids.clone()
    changed[:, 9] += 1
    moved = (model(ids) - model(changed % 50)).abs().amax(dim=(0, 2))
    assert moved[9:].min() > 1e-9
    if family == "bert":
        assert moved[:9].min() > 1e-9
    else:
        assert moved[:9].max() < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_know_their_place(family):
    model = tiny_model(family)
    ids = torch.randint(50, (1, 16))
    turned = ids[:, [1, 0, *range(2, 16)]]
    assert (model(ids) - model(turned))[:, 2:].abs().max() > 1e-6


def test_rotary_scores_depend_on_the_distance_alone():
    same = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 12, 8)
    other = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 12, 8)
    scores = (rotate(same, 100.0) @ rotate(other, 100.0).mT)[0, 0]
    for distance in range(12):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert scores[0].std() > 1e-3


def test_rotary_angles_are_exact_at_far_positions_in_16_bit():
    x = torch.ones(1, 1, 8192, 4, dtype=torch.bfloat16)
    exact = rotate(x.double(), 500000.0)
    assert (rotate(x, 500000.0).double() - exact).abs().max() < 2**-7


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@EVERY_HEAD
def test_a_loss_in_chunks_is_the_loss_and_so_are_its_gradients(family, tied):
    model = tiny_model(family, tied=tied)
    ids, targets = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    targets[0, 3:9] = IGNORED  # more than a whole chunk
    whole = summed_loss(model, ids, targets)
    whole.backward()
    expected = gradients(model)
    logits = torch.nn.functional.log_softmax(model(ids), dim=-1)
    valid = targets != IGNORED
    assert whole.item() == pytest.approx(-logits[valid].gather(1, targets[valid][:, None]).sum().item())
    for chunk in (1, 5, 31, 32, 100):
        loss = summed_loss(model, ids, targets, loss_chunk=chunk)
        loss.backward()
        torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


@EVERY_HEAD
def test_a_new_model_guesses_at_random(family, tied):
    model, ids = tiny_model(family, tied=tied, hidden=96), torch.randint(50, (4, 16))
    loss = summed_loss(model, ids, torch.randint(50, (4, 16))) / ids.numel()
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.3)


@EVERY_HEAD
def test_the_head_is_the_token_embedding_where_it_is_tied(family, tied):
    model = tiny_model(family, tied=tied)
    summed_loss(model, torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 7)).backward()
    reached = model.tokens.weight.grad[7].abs().sum()  # 7 is never an input: it is reached through the head only
    assert bool(reached) is tied
    assert ("head.weight" in dict(model.named_parameters())) is not tied


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_compile_and_give_the_same(family):
    model, ids = tiny_model(family), torch.randint(50, (2, 16))
    expected = model(ids)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ids), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_sums_its_loss_in_fp32(family, dtype):
    model, exact = tiny_model(family).to(dtype), tiny_model(family)
    ids = torch.randint(50, (2, 16))
    loss = summed_loss(model, ids, ids, loss_chunk=8)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(summed_loss(exact, ids, ids).item(), rel=0.02)


PEAKS = """
import resource, torch
from mics.init import materialise
from mics.models.transformer import build_transformer, summed_loss
from mics.shapes import ModelShape

torch.set_num_threads(1)
model = build_transformer(ModelShape(16, 1, 2, vocabulary=40_000, tied=False), torch.float32)
materialise(model, model.fill, seed=0, device=torch.device("cpu"))
ids = torch.randint(40_000, (1, 1024))
for chunk in (64, 0):
    summed_loss(model, ids, ids, loss_chunk=chunk).backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_a_loss_in_chunks_never_has_all_logits():
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=120, check=True)
    chunked, whole = (1024 * int(kib) for kib in done.stdout.split())
    logits_bytes = 4 * 1024 * 40_000
    assert whole - chunked > 1.5 * logits_bytes  # the logits and their gradient, or their log-softmax
