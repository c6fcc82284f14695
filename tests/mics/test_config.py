from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.config import CheckpointConfig, LimitsConfig, ProfileConfig, RunConfig, TrainConfig, ValidationConfig
from mics.shapes import PRESETS, ModelShape
from mics.strategies import STRATEGIES
from mics.topology import RankGrid

RESOLVED = TrainConfig(
    partition=2,
    hierarchical=False,
    micro_batch=1,
    precision="fp32",
    checkpointing="none",
    reshard_after_forward=True,
)
RUN = RunConfig("r", RESOLVED, nodes=4, devices_per_node=2)

trains = st.builds(
    TrainConfig,
    model=st.sampled_from([*PRESETS, ModelShape(hidden=8, layers=1, heads=2, ffn=3)]),
    data=st.lists(st.text(min_size=1), min_size=1).map(tuple),
    strategy=st.sampled_from(STRATEGIES),
    partition=st.integers(1, 512),
    hierarchical=st.booleans(),
    micro_batch=st.integers(1, 64),
    lr=st.floats(1e-12, 1e12),
    precision=st.sampled_from(("fp32", "bf16", "fp16", "fp64")),
    checkpointing=st.sampled_from(("none", "selective", "full")),
    reshard_after_forward=st.booleans() | st.integers(2, 8),
    seed=st.integers(),
    checkpoint=st.builds(CheckpointConfig, path=st.text(min_size=1).map("s3://b{}".format), every=st.integers(0, 99)),
    validation=st.builds(ValidationConfig, every=st.integers(0, 9), share=st.floats(0.01, 0.99)),
    limits=st.builds(LimitsConfig, skipped_steps=st.integers(1, 99)),
    profile=st.builds(ProfileConfig, first_step=st.integers(0, 99), memory=st.booleans()),
)
runs = st.builds(
    RunConfig,
    run_id=st.text(),
    train=trains,
    nodes=st.integers(1, 1000),
    devices_per_node=st.integers(1, 16),
    interface=st.none() | st.text(),
    resume_from=st.none() | st.text(),
)


@given(runs)
def test_run_json_reads_back_equal(run: RunConfig) -> None:
    assert RunConfig.from_json(run.to_json()) == run


def test_run_json_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RUN.to_json())
    assert RunConfig.read(tmp_path / "run.json") == RUN


def test_a_run_knows_its_grid() -> None:
    assert RUN.world_size == 8
    assert RUN.grid == RankGrid(8, 2, 2)
    assert replace(RUN, train=replace(RESOLVED, strategy="zero3", partition=8)).grid == RankGrid(8, 2, 8)
    assert RUN.global_batch == 8 * 1 * 4
    assert RUN.checkpoint_folder == "/fsx/checkpoints/r"
    slash = replace(RESOLVED, checkpoint=CheckpointConfig("/fsx/a/"))
    assert replace(RUN, train=slash).checkpoint_folder == "/fsx/a/r"


@pytest.mark.parametrize("name", ["partition", "hierarchical", "micro_batch", "precision"])
def test_a_run_has_no_auto_left(name: str) -> None:
    with pytest.raises(ValueError, match=f"train.{name} is still auto"):
        replace(RUN, train=replace(RESOLVED, **{name: "auto"}))


def test_a_model_may_be_a_preset_or_a_shape() -> None:
    assert TrainConfig().shape is PRESETS["gpt-3m"]
    shape = ModelShape(hidden=8, layers=1, heads=2)
    assert TrainConfig(model=shape).shape is shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "foo"}, "unknown model 'foo'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"sequence": 257}, "sequence 257 is longer than the model's 256 positions"),
        ({"partition": 0}, "partition must be at least 1"),
        ({"micro_batch": -1}, "micro_batch must be at least 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"lr": 0.0}, "lr must be positive and finite"),
        ({"lr": float("inf")}, "lr must be positive and finite"),
        ({"lr": float("nan")}, "lr must be positive and finite"),
        ({"clip": -1.0}, "clip must be positive and finite"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more"),
        ({"data": ()}, "data names no corpus"),
        ({"data": ("stdlib", "")}, "data names no corpus"),
    ],
)
def test_a_value_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_a_checkpoint_needs_an_absolute_path_and_a_period() -> None:
    with pytest.raises(ValueError, match="must be an absolute folder or s3://bucket/prefix"):
        CheckpointConfig(path="a")
    with pytest.raises(ValueError, match="every must be at least 0, got -1"):
        CheckpointConfig(every=-1)


def changed(**changes: Any) -> dict[str, Any]:
    return {**json.loads(RUN.to_json()), **changes}


def changed_train(**changes: Any) -> dict[str, Any]:
    return changed(train={**json.loads(RUN.to_json())["train"], **changes})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "run.json must hold one object"),
        (changed(extra=1), "run.json: unknown key 'extra'"),
        (changed_train(extra=1), "train: unknown key 'extra'"),
        (changed_train(checkpoint={"pth": "/x"}), "train.checkpoint: unknown key 'pth'"),
        (changed_train(checkpoint=3), "train.checkpoint must hold one object"),
        (changed_train(model={"hidden": 8}), "train.model: .*layers"),
        (changed_train(model={"hidden": 8, "layers": 1, "heads": 2, "x": 1}), "train.model: unknown key 'x'"),
        (changed_train(steps="x"), "train: steps must be a whole number, got 'x'"),
        (changed_train(steps=2.5), "train: steps must be a whole number, got 2.5"),
        (changed_train(steps=True), "train: steps must be a whole number, got True"),
        (changed_train(lr="1e-3"), "train: lr must be a number, got '1e-3'"),
        (changed_train(deterministic="false"), "train: deterministic must be true or false, got 'false'"),
        (changed_train(schedule="linear"), "train: schedule must be cosine or wsd, got 'linear'"),
        (changed_train(partition="two"), "train: partition must be a whole number or auto, got 'two'"),
        (changed_train(data="stdlib"), "train: data must be a list, each item a text, got 'stdlib'"),
        (changed_train(data=[3]), "train: data must be a list, each item a text, got "),
        (changed_train(model=3), "train: model must be a text or an object, got 3"),
        (changed_train(model={"hidden": 8.0, "layers": 1, "heads": 2}), "train.model: hidden must be a whole number"),
        (changed(nodes=0), "nodes must be at least 1, got 0"),
        (changed(interface=0), "run.json: interface must be a text or null, got 0"),
        (changed(node_order=[0, 1, 2]), "node_order must name 4 different nodes"),
        (changed(node_order=[0, 1, 2, 2]), "node_order must name 4 different nodes"),
        (changed(node_names=["a", "b", "c"]), "node_names has 3 names and none for node 3"),
        (changed_train(partition="auto"), "train.partition is still auto"),
        (changed(train=3), "train must hold one object"),
        ({"train": changed()["train"]}, "run.json: .*run_id"),
        ({"run_id": "r", "nodes": 1, "devices_per_node": 1}, "still auto"),
    ],
)
def test_a_faulty_run_json_names_the_key(raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(json.dumps(raw))


def test_text_that_is_no_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        RunConfig.from_json("{")
