from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.shapes import PRESETS, ModelShape, shape_of
from pydantic import TypeAdapter, ValidationError

SHAPES = TypeAdapter(ModelShape)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b-like", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_public_models_have_exactly_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bert-10b", 10.1),
        ("bert-15b", 15.0),
        ("bert-20b", 20.3),
        ("bert-50b", 50.2),
        ("roberta-20b", 19.8),
        ("gpt2-20b", 19.8),
        ("bert-1.5b", 1.5),
        ("gpt-100b", 100),
    ],
)
def test_the_papers_models_have_their_published_size(name: str, billions: float) -> None:
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005, abs=0.051)


def test_a_small_decoder_by_hand() -> None:
    shape = ModelShape(hidden=6, layers=2, heads=3, vocabulary=10, ffn=7, positions=5)
    norms, attention, feed_forward = 4 * 6, (6 * 18 + 18) + (6 * 6 + 6), (6 * 7 + 7) + (7 * 6 + 6)
    assert shape.block_parameters == norms + attention + feed_forward
    assert shape.root_parameters == 10 * 6 + 5 * 6 + 2 * 6
    assert shape.parameters == 2 * shape.block_parameters + shape.root_parameters
    assert (shape.masked, shape.gated, shape.kv_hidden) == (False, False, 6)


def test_a_small_encoder_by_hand() -> None:
    shape = ModelShape(hidden=6, layers=1, heads=3, vocabulary=10, ffn=7, positions=5, family="bert")
    decoder = ModelShape(hidden=6, layers=1, heads=3, vocabulary=10, ffn=7, positions=5)
    assert shape.block_parameters == decoder.block_parameters
    assert shape.root_parameters == decoder.root_parameters + (6 * 6 + 6) + 2 * 6 + 10
    assert shape.masked


def test_a_small_decoder_of_today_by_hand() -> None:
    shape = ModelShape(hidden=8, layers=1, heads=4, vocabulary=10, ffn=7, family="llama", kv_heads=2, tied=False)
    assert shape.kv_hidden == 4
    assert shape.block_parameters == 2 * 8 + (8 * 8 + 2 * 8 * 4) + 8 * 8 + 3 * 8 * 7
    assert shape.root_parameters == 2 * 10 * 8 + 8
    assert shape.gated


def test_flops_by_hand() -> None:
    shape = ModelShape(hidden=6, layers=2, heads=3, vocabulary=10, ffn=7, positions=5)
    multiplied = 2 * (4 * 6 * 6 + 2 * 6 * 7) + 6 * 10
    assert shape.flops_per_token(5) == 2 * multiplied + 2 * (2 * 2 * 5 * 6)  # scores and mixing: s x h each, a layer


@pytest.mark.parametrize(("name", "sequence"), [("gpt2-20b", 1024), ("bert-10b", 512), ("gpt-100b", 2048)])
def test_flops_are_those_of_megatrons_formula(name: str, sequence: int) -> None:
    """Narayanan et al., equation 3: 96 B s l h^2 (1 + s/6h + V/16lh) for 4 passes; for one token and pass a part."""
    shape = PRESETS[name]
    h, layers, vocabulary = shape.hidden, shape.layers, shape.vocabulary
    expected = 24 * layers * h**2 * (1 + sequence / (6 * h)) + 2 * h * vocabulary
    assert shape.flops_per_token(sequence) == pytest.approx(expected, rel=1e-3)


def test_ffn_defaults_to_four_times_hidden() -> None:
    assert ModelShape(hidden=6, layers=1, heads=1).ffn_hidden == 24
    assert ModelShape(hidden=6, layers=1, heads=1, ffn=5).ffn_hidden == 5


def test_a_shape_is_its_own_shape() -> None:
    shape = ModelShape(hidden=4, layers=1, heads=2)
    assert shape_of(shape) is shape
    assert shape_of("gpt-3m") is PRESETS["gpt-3m"]


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'foo'") as caught:
        shape_of("foo")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"layers": -1}, "layers must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"vocabulary": 0}, "vocabulary must be at least 1"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"ffn": -1}, "ffn must be positive"),
        ({"heads": 3}, "hidden 8 is not divisible by heads 3"),
        ({"family": "mamba"}, "unknown family 'mamba'; known: gpt, bert, llama"),
        ({"kv_heads": 1}, "kv_heads and rope_theta belong to family llama, not to gpt"),
        ({"family": "bert", "rope_theta": 5e5}, "belong to family llama, not to bert"),
        ({"family": "llama", "kv_heads": 4}, "heads 2 is not divisible by kv_heads 4"),
        ({"family": "llama", "kv_heads": -1}, "kv_heads must be positive"),
        ({"family": "llama", "heads": 8}, "hidden / heads is 1; rotary positions need an even number"),
        ({"norm_eps": 0.0}, "norm_eps must be positive and finite"),
        ({"family": "llama", "rope_theta": float("inf")}, "rope_theta must be positive and finite"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(**{"hidden": 8, "layers": 1, "heads": 2, **changes})


@given(
    family=st.sampled_from(("gpt", "bert", "llama")),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    tied=st.booleans(),
    theta=st.floats(1.0, 1e6),
)
def test_text_makes_the_shape_that_python_makes(
    family: Any, kv_heads: int, groups: int, tied: bool, theta: float
) -> None:
    llama = {"kv_heads": kv_heads, "rope_theta": theta} if family == "llama" else {}
    heads = kv_heads * groups
    values = {"hidden": 4 * heads, "layers": 1, "heads": heads, "family": family, "tied": tied, **llama}
    assert SHAPES.validate_json(json.dumps(values)) == ModelShape(**values)


@pytest.mark.parametrize(("field", "value"), [("family", "opt"), ("tied", 1), ("kv_heads", "2"), ("kvheads", 2)])
def test_text_is_read_strictly(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=f"1 validation error for ModelShape\n{field}"):
        SHAPES.validate_json(json.dumps({"hidden": 8, "layers": 1, "heads": 2, field: value}))
