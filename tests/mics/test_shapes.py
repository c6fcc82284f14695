from __future__ import annotations

import pytest
from mics.shapes import PRESETS, ModelShape, shape_of


@pytest.mark.parametrize(("name", "parameters"), [("gpt2-124m", 124_439_808), ("gpt2-1.5b", 1_557_611_200)])
def test_gpt2_has_its_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].parameters == parameters


def test_parameters_by_hand() -> None:
    shape = ModelShape(hidden=6, layers=2, heads=3, vocabulary=10, ffn=7, positions=5)
    block = 2 * (6 + 6) + (6 * 18 + 18) + (6 * 6 + 6) + (6 * 7 + 7) + (7 * 6 + 6)
    assert shape.block_parameters == block
    assert shape.root_parameters == 10 * 6 + 5 * 6 + 2 * 6
    assert shape.parameters == 2 * block + shape.root_parameters


def test_the_feed_forward_layer_is_four_times_as_wide_unless_told() -> None:
    assert ModelShape(hidden=6, layers=1, heads=1).ffn_hidden == 24
    assert ModelShape(hidden=6, layers=1, heads=1, ffn=5).ffn_hidden == 5


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_about_the_size_in_its_name(name: str) -> None:
    size = name.split("-")[1]
    expected = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert PRESETS[name].parameters == pytest.approx(expected, rel=0.1)


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
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(**{"hidden": 8, "layers": 1, "heads": 2, **changes})
