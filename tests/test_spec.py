from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mics.config import (
    CheckpointConfig,
    Checkpointing,
    LimitsConfig,
    Precision,
    ProfileConfig,
    TrainConfig,
    ValidationConfig,
)
from mics.shapes import PRESETS, ModelShape
from mics.strategies import STRATEGIES

from micsctl.errors import ExitCode, UsageError
from micsctl.spec import (
    ClusterSpec,
    SandboxSpec,
    Spec,
    dump,
    find_file,
    format_bytes_binary,
    load,
    override,
    parse,
)

words = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=12)
names = st.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True)
positive = st.floats(1e-12, 1e12)


def annotated(model: type, field: str) -> st.SearchStrategy[str]:
    """The words that a Literal field allows."""
    return st.sampled_from(get_args(model.model_fields[field].annotation))  # type: ignore[attr-defined]


counts = st.integers(0, 1000)
checkpoints = st.builds(
    CheckpointConfig,
    path=words.map(lambda w: f"/a{w}") | words.map(lambda w: f"s3://b{w}"),
    every=counts,
    keep=counts,
    keep_every=counts,
    background=st.booleans(),
)
validations = st.builds(ValidationConfig, every=counts, share=st.floats(0.01, 0.99), sequences=st.integers(1, 99))
limits = st.builds(LimitsConfig, skipped_steps=st.integers(1, 99), first_step_seconds=positive, step_seconds=positive)
profiles = st.builds(ProfileConfig, first_step=counts, steps=st.integers(1, 99), memory=st.booleans())
shapes = st.builds(
    lambda width, heads, **rest: ModelShape(hidden=width * heads, heads=heads, **rest),
    width=st.integers(1, 64),
    heads=st.integers(1, 16),
    layers=st.integers(1, 100),
    vocabulary=st.integers(1, 100_000),
    ffn=st.integers(0, 1000),
    positions=st.integers(256, 4096),
)
trains = st.builds(
    TrainConfig,
    model=st.sampled_from(list(PRESETS)) | shapes,
    data=st.lists(words.filter(bool), min_size=1, max_size=3).map(tuple),
    strategy=st.sampled_from(STRATEGIES),
    partition=st.just("auto") | st.integers(1, 512),
    hierarchical=st.just("auto") | st.booleans(),
    micro_batch=st.just("auto") | st.integers(1, 64),
    accumulation=st.integers(1, 64),
    sequence=st.integers(1, 256),
    steps=st.integers(1, 10**6),
    lr=positive,
    warmup=st.integers(0, 1000),
    weight_decay=st.floats(0, 10),
    clip=positive,
    precision=st.sampled_from(("auto", *get_args(Precision))),
    checkpointing=st.sampled_from(("auto", *get_args(Checkpointing))),
    reshard_after_forward=st.just("auto") | st.booleans() | st.integers(1, 64),
    mask_token=st.just("auto") | counts,
    loss_chunk=counts,
    seed=st.integers(-(2**31), 2**63),
    validation=validations,
    checkpoint=checkpoints,
    limits=limits,
    profile=profiles,
)
specs = st.builds(
    Spec,
    name=names,
    provider=annotated(Spec, "provider"),
    cluster=st.builds(
        ClusterSpec,
        nodes=st.integers(1, 1000),
        zones=st.lists(words, max_size=3).map(tuple),
        ttl=st.integers(1, 365 * 86400).map(lambda seconds: timedelta(seconds=seconds)),
        subnet=st.none() | words,
        image=st.none() | words,
        instance_profile=st.just("nodes"),  # checkpoints may lie in S3
    ),
    sandbox=st.builds(
        SandboxSpec,
        devices_per_node=st.integers(1, 8),
        device_memory=st.integers(1, 2**50),
        links=annotated(SandboxSpec, "links"),
        link_mbps=st.none() | st.integers(1, 100_000),
        level=annotated(SandboxSpec, "level"),
    ),
    train=trains,
)


@settings(max_examples=30)
@given(specs)
@example(Spec())
def test_what_is_dumped_reads_back_equal(spec: Spec) -> None:
    assert parse(dump(spec)) == spec


def test_nothing_means_every_default() -> None:
    assert parse("") == parse("# a comment\n") == parse("{}") == Spec()


def test_the_dump_shows_every_key() -> None:
    text = dump(Spec())
    models = (Spec, ClusterSpec, SandboxSpec)
    sections = (TrainConfig, ValidationConfig, CheckpointConfig, LimitsConfig, ProfileConfig)
    keys = [key for model in models for key in model.model_fields]
    keys += [key for section in sections for key in section.__dataclass_fields__]
    assert [key for key in keys if f"{key}:" not in text] == []
    assert "device_memory: 54MiB" in text
    assert "ttl: 12h" in text


@pytest.mark.parametrize(("text", "expected"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("0.5", 0.5), ("1", 1.0)])
def test_numbers_as_people_write_them(text: str, expected: float) -> None:
    assert parse(f"train: {{lr: {text}}}").train.lr == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("54MiB", 54 << 20), ("1GiB", 1 << 30), ("1GB", 10**9), ("123", 123), ("1.5KiB", 1536)],
)
def test_bytes_as_people_write_them(text: str, expected: int) -> None:
    assert parse(f"sandbox: {{device_memory: {text}}}").sandbox.device_memory == expected


@given(st.integers(1, 2**50))
def test_bytes_read_back(size: int) -> None:
    assert parse(f"sandbox: {{device_memory: {format_bytes_binary(size)}}}").sandbox.device_memory == size


@pytest.mark.parametrize("model", ["my.package:factory", "hf:Qwen/Qwen3-0.6B", "hf:/fsx/config.json"])
def test_a_model_may_be_the_users_own(model: str) -> None:
    spec = parse(f"train: {{model: '{model}', sequence: 4096}}")
    assert (spec.train.model, spec.train.shape) == (model, None)
    assert parse(dump(spec)) == spec


def test_true_is_no_number_of_ranks() -> None:
    kept = [parse(f"train: {{reshard_after_forward: {word}}}").train.reshard_after_forward for word in ("true", "1")]
    assert [type(value) for value in kept] == [bool, int]


def test_a_model_may_be_a_shape() -> None:
    spec = parse("train:\n  model: {hidden: 64, layers: 2, heads: 4}\n  sequence: 64")
    assert spec.train.model == ModelShape(hidden=64, layers=2, heads=4)


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("nam: x", 1, ("unknown key 'nam'", "did you mean 'name'?")),
        ("train: {modle: gpt-3m}", 1, ("unknown key 'train.modle'", "'model'")),
        ("name: a\ntrain:\n  lr: abc\n", 3, ("train.lr", 'got "abc"')),
        ("train:\n  checkpoint:\n    pth: /x", 3, ("unknown key 'train.checkpoint.pth'", "'path'")),
        ("train:\n  checkpoint: {path: x}", 2, ("checkpoint.path must be an absolute folder or s3://", "'x'")),
        (
            "name: a\ntrain:\n  steps: 1\n  checkpoint: {path: 's3://bucket/a'}",
            4,
            ("checkpoint.path is in S3, so cluster.instance_profile must name a role",),
        ),
        ("train:\n  data: [stdlib, 's3://bucket/a']", 2, ("data is in S3, so cluster.instance_profile",)),
        ("train:\n  checkpoint: {path: 's3://'}", 2, ("checkpoint.path must be an absolute folder",)),
        ("train:\n  checkpoint:\n    keep: 2\n    every: -1", 4, ("train.checkpoint: checkpoint.every must be",)),
        ("train:\n  seed: 1\n  lr: 0", 3, ("train: lr must be positive and finite, got 0",)),
        ("train:\n  validation:\n    every: 1\n    share: 1.5", 4, ("validation.share must lie between 0 and 1",)),
        ("train:\n  validation:\n    data: /x", 3, ("train.validation.data", "array", 'got "/x"')),
        ("train:\n  limits:\n    step_second: 1", 3, ("'train.limits.step_second'", "'step_seconds'")),
        ("train:\n  limits:\n    step_seconds: 0", 3, ("limits.step_seconds must be positive",)),
        ("train:\n  profile: {memory: 3}", 2, ("train.profile.memory", "boolean")),
        ("train:\n  profile: 3", 2, ("train.profile", "got 3")),
        ("train:\n  compile: true", 2, ("train.compile", "'inductor'", "got true")),
        ("train:\n  reshard_after_forward: half", 2, ("train.reshard_after_forward", "boolean or", 'got "half"')),
        ("train:\n  checkpointing: some", 2, ("train.checkpointing", "'selective'", 'got "some"')),
        ("zzz: 1", 1, ("unknown key 'zzz'", "known keys: name, provider, cluster, sandbox, train")),
        ("cluster: {ttl: 12}", 1, ("cluster.ttl", "12h", "not 12")),
        ("cluster: {ttl: 0h}", 1, ("cluster.ttl",)),
        ("cluster: {ttl: 9999d}", 1, ("cluster.ttl", "year")),
        ("cluster:\n  nodes: 0", 2, ("cluster.nodes", "greater than or equal to 1")),
        ("cluster:\n  nodes: '4'", 2, ("cluster.nodes", "valid integer")),
        ("cluster: 3", 1, ("cluster", "an object", "got 3")),
        ("cluster: {type: p4d}", 1, ("cluster.type",)),
        ("name: Demo", 1, ("name", "pattern")),
        ("name: 2026-01-01", 1, ("name", "2026-01-01")),
        ("provider: azure", 1, ("provider", "'aws' or 'sandbox'")),
        ("sandbox: {device_memory: 3x}", 1, ("sandbox.device_memory", '"3x"')),
        ("sandbox: {device_memory: 0}", 1, ("sandbox.device_memory", "got 0")),
        ("sandbox: {links: slow}", 1, ("sandbox.links", "p3dn")),
        ("train: {model: foo}", 1, ("unknown model 'foo'", "gpt-3m")),
        ("train: {model: 3}", 1, ("train.model", "string or an object")),
        ("train: {model: {hidden: 10, layers: 3, heads: 3}}", 1, ("train.model", "not divisible by heads 3")),
        ("train: {model: {hidden: 10, layrs: 3}}", 1, ("'train.model.layrs'", "'layers'", "train.model.heads")),
        ("train: {model: {hidden: x, layers: 3, heads: 3}}", 1, ("train.model.hidden", 'got "x"')),
        ("train: {strategy: foo}", 1, ("train.strategy", "'zero3'")),
        ("train: {strategy: {a: 1}}", 1, ("train.strategy", 'got {"a": 1}')),
        ("name: {a: 1}", 1, ("name", "valid string")),
        ("train: {partition: x}", 1, ("train.partition", "integer or 'auto'")),
        ("train: {partition: 1.5}", 1, ("train.partition", "got 1.5")),
        ("train: {partition: 0}", 1, ("partition must be at least 1, got 0",)),
        ("train: {hierarchical: 3}", 1, ("train.hierarchical", "boolean or 'auto'")),
        ("train: {steps: 0}", 1, ("steps must be at least 1, got 0",)),
        ("train: {steps: true}", 1, ("train.steps", "got true")),
        ("train: {lr: .inf}", 1, ("lr must be positive and finite",)),
        ("train: {lr: .nan}", 1, ("lr must be positive and finite",)),
        ("train: {sequence: 999}", 1, ("sequence 999 is longer than the model's 256 positions",)),
        ("train: {data: []}", 1, ("data names no corpus",)),
        ("train: {data: stdlib}", 1, ("train.data", "array")),
        ("1: 2", 1, ("a key must be a word",)),
        ("name: a\n? [1, 2]\n: 3", 2, ("a key must be a word",)),
        ("cluster:\n  <<: {nodes: 3}", 2, ("a key must be a word",)),
        ("name: &x a", 1, ("anchors and tags",)),
        ("train:\n  data: &d [*d]", 2, ("anchors and tags",)),
        ("train:\n  seed: !!binary aGk=", 2, ("anchors and tags",)),
        ("cluster: !!python/object:os.system {}", 1, ("anchors and tags",)),
    ],
)
def test_a_faulty_key_is_named_with_its_line(text: str, line: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "my.yaml")
    error = caught.value
    assert error.exit_code == ExitCode.USAGE
    assert error.what == "my.yaml is not valid"
    assert f"my.yaml:{line}: " in error.why
    assert [part for part in parts if part not in error.why] == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [", "my.yaml:1 is not valid YAML"),
        ("name: a\nname: b", "my.yaml:2 is not valid YAML"),
        ("a: 'b", "my.yaml:1 is not valid YAML"),
        ("name: a\n\tb: 1", "my.yaml:2 is not valid YAML"),
        ("\x00", "my.yaml is not valid YAML"),
        ("- 1", "my.yaml must hold keys and values"),
        ("demo", "my.yaml must hold keys and values"),
        ("a: " + "[" * 400, "my.yaml:1 is not valid YAML"),
    ],
)
def test_text_that_is_no_mapping(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "my.yaml")
    assert caught.value.what == what


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse("nam: x\ncluster:\n  nodes: 0\ntrain:\n  lr: abc\n")
    assert len(caught.value.why.splitlines()) == 3


_KEYS = ("name", "cluster", "train", "model", "lr", "data", "1", "<<", "? [a]", "&a x", "*a", "2026-01-01", "ttl")
_VALUES = ("1", "x", "{a: 1}", "[1]", "~", "*a", "&b [*b]", "!!set {a}", "!!omap [a: 1]", ".nan", "1e999", "12h", "'a")


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(_KEYS), st.sampled_from(("", *_VALUES))), min_size=1, max_size=4
    )
)
def test_whatever_is_written_gives_a_spec_or_a_usage_error(lines: list[tuple[int, str, str]]) -> None:
    text = "\n".join(f"{'  ' * depth}{key}: {value}" for depth, key, value in lines)
    try:
        spec = parse(text)
    except UsageError:
        return
    assert parse(dump(spec)) == spec


@given(st.text(max_size=60))
def test_any_text_gives_a_spec_or_a_usage_error(text: str) -> None:
    try:
        parse(text)
    except UsageError:
        return


def test_the_file_is_looked_for_upward(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "mics.yaml").write_text("name: found")
    assert find_file(below) == tmp_path / "mics.yaml"
    assert load(tmp_path / "mics.yaml").name == "found"
    (below / "mics.yaml").mkdir()  # a folder of that name is not it
    assert find_file(below) == tmp_path / "mics.yaml"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read") as caught:
        load(tmp_path / "mics.yaml")
    assert caught.value.next == "micsctl init"
    (tmp_path / "mics.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "mics.yaml")
    assert "UTF-8" in caught.value.why


def test_flags_win_over_the_file() -> None:
    spec = override(parse("name: a\ncluster: {region: us-east-1, nodes: 7}"), name="b", region="eu-west-1")
    assert (spec.name, spec.cluster.region, spec.cluster.nodes) == ("b", "eu-west-1", 7)
    assert override(spec) == spec
    assert override(spec, ttl="90m").cluster.ttl == timedelta(minutes=90)
    with pytest.raises(UsageError) as caught:
        override(spec, name="Not A Name")
    assert "name" in caught.value.why
