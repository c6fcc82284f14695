from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mics.config import RunConfig, TrainConfig
from mics.shapes import PRESETS, ModelShape, shape_of
from mics.strategies import STRATEGIES

from micsctl.errors import ExitCode, UsageError
from micsctl.planner.machines import machines_of
from micsctl.planner.memory import estimate
from micsctl.planner.model import Machines
from micsctl.planner.plan import plan
from micsctl.report.plans import plan as report
from micsctl.spec import Spec

SANDBOX = machines_of(Spec())
P4D = Machines(4, 8, 40 << 30, "A100", bf16=True)

trains = st.builds(
    TrainConfig,
    model=st.sampled_from(
        [
            *(name for name in PRESETS if "-100b" not in name),
            ModelShape(hidden=1024, layers=2, heads=8, vocabulary=5000),
        ]
    ),
    strategy=st.sampled_from(STRATEGIES),
    micro_batch=st.sampled_from(("auto", 1, 3, 16)),
    accumulation=st.integers(1, 8),
    precision=st.sampled_from(("auto", "fp32", "bf16", "fp16")),
    checkpointing=st.sampled_from(("auto", "none", "selective", "full")),
    reshard_after_forward=st.sampled_from(("auto", True, False)),
    loss_chunk=st.sampled_from((0, 64)),
)
clusters = st.builds(
    Machines,
    nodes=st.integers(1, 16),
    devices_per_node=st.sampled_from((1, 2, 4, 8)),
    device_memory_bytes=st.sampled_from((54 << 20, 1 << 30, 40 << 30, 141 << 30)),
    device=st.sampled_from(("cpu", "A100")),
    bf16=st.booleans(),
)


def train(**changes: Any) -> TrainConfig:
    return replace(TrainConfig(), **changes)


def refusal(asked: TrainConfig, machines: Machines) -> UsageError:
    with pytest.raises(UsageError) as caught:
        plan(asked, machines)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.next
    return caught.value


def test_the_default_sandbox_needs_exactly_one_node_per_partition_group() -> None:
    made = plan(TrainConfig(), SANDBOX)
    assert made.partition_size == SANDBOX.devices_per_node == 2
    assert (made.train.partition, made.train.micro_batch, made.train.hierarchical) == (2, 1, False)
    assert made.train.precision == "fp32"
    alone, pair = made.candidates[:2]
    assert alone.memory.states > 1.02 * made.memory_limit_bytes  # whatever the rest is
    assert pair.memory.total < 0.96 * made.memory_limit_bytes


def test_the_reason_says_why() -> None:
    text = plan(TrainConfig(), SANDBOX).reason
    for part in ("p = 2", "16 bytes", "3.3 M parameters", "50.2 MiB", "48.6 MiB (90 % of 54.0 MiB)", "p = 1 needs"):
        assert part in text
    assert "2 devices fill one node, so gathers stay inside it (4 replicas)" in text
    assert "Micro-batch 1: the largest of 8, 4, 2, 1" in text
    assert "Checkpointing none: it fits without computing activations again" in text
    assert "fp32: cpu has no fast bf16" in text


@pytest.mark.parametrize(
    ("changes", "machines", "parts"),
    [
        ({"strategy": "zero3"}, SANDBOX, ("p = 8, as strategy zero3 fixes it", "fills 4 nodes", "one flat stage")),
        ({"partition": 4}, SANDBOX, ("p = 4, as train.partition says", "fills 2 nodes", "two stages", "2 replicas")),
        (
            {"model": "gpt2-1.5b", "sequence": 1024},
            P4D,
            ("partition groups share one node", "bf16: A100 computes in bf16"),
        ),
        ({}, P4D, ("nothing has to be sharded", "Every device holds a replica (32 replicas)")),
        ({"precision": "bf16"}, SANDBOX, ("bf16 as asked for, but cpu",)),
    ],
)
def test_the_reason_of_other_plans(changes: dict[str, Any], machines: Machines, parts: tuple[str, ...]) -> None:
    text = plan(train(**changes), machines).reason
    assert [part for part in parts if part not in text] == []


def test_strategies_compare_with_equal_work() -> None:
    made = {name: plan(train(strategy=name), SANDBOX).train.micro_batch for name in ("mics", "mics-flat", "zero3")}
    assert set(made.values()) == {1}


def test_a_partition_size_that_is_asked_for_may_take_a_smaller_micro_batch() -> None:
    free = plan(train(model="gpt2-1.5b", sequence=1024), P4D)
    assert (free.partition_size, free.train.micro_batch) == (4, 8)
    asked = plan(train(model="gpt2-1.5b", sequence=1024, partition=2), P4D)
    assert (asked.partition_size, asked.train.micro_batch) == (2, 4)


def test_a_hierarchical_plan_sends_less_than_a_flat_one_and_both_less_than_zero3() -> None:
    made = [plan(train(strategy=name, partition=4), SANDBOX) for name in ("mics", "mics-flat")]
    assert [p.hierarchical for p in made] == [True, False]
    assert made[0].traffic_bytes < made[1].traffic_bytes
    zero3 = plan(train(strategy="zero3"), SANDBOX)
    assert zero3.traffic_bytes == zero3.traffic_zero3_bytes == made[0].traffic_zero3_bytes


def test_traffic_of_the_default_plan_by_hand() -> None:
    """fp32, 4 micro-steps, n = 8: hop 2 alone for mics, two gathers of the blocks and one of the root for zero3."""
    made = plan(TrainConfig(), SANDBOX)
    blocks, root = 4 * 4 * 789_760, 4 * 131_584
    assert made.traffic_bytes == pytest.approx(2 * 3 / 4 * (blocks + root))
    assert made.traffic_zero3_bytes == pytest.approx(7 / 8 * 4 * (3 * blocks + 2 * root))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"partition": 3}, ("partition size 3 does not divide the world size 8", "1, 2, 4, 8")),
        ({"partition": 16}, ("does not divide", "1, 2, 4, 8")),
        ({"strategy": "zero3", "partition": 2}, ("zero3 fixes the partition size to 8, not 2",)),
        ({"hierarchical": True}, ("hierarchical", "2 <= 2")),
        ({"strategy": "mics-flat", "partition": 4, "hierarchical": True}, ("mics-flat is flat",)),
    ],
)
def test_a_grid_that_the_machines_cannot_have_is_refused(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    error = refusal(train(**changes), SANDBOX)
    assert "4 nodes x 2 devices" in error.what
    assert [part for part in parts if part not in error.why] == []


def test_a_partition_size_that_neither_fits_in_nor_fills_nodes_is_refused() -> None:
    assert "it may be 1, 2, 4, 12" in refusal(train(partition=6), Machines(3, 4, 1 << 30, "cpu", bf16=False)).why


def test_a_model_that_fits_nowhere_says_how_many_nodes_would_do() -> None:
    one_node = replace(P4D, nodes=1)
    error = refusal(train(model="gpt2-20b", sequence=1024), one_node)
    assert "gpt2-20b does not fit 1 x 8 A100" in error.what
    assert "at p = 8, the largest, and micro-batch 1, checkpointing full a device needs 46.3 GiB" in error.why
    assert "cluster.nodes: 2" in error.next
    assert plan(train(model="gpt2-20b", sequence=1024), replace(P4D, nodes=2)).partition_size == 16
    error = refusal(train(model="gpt2-20b", sequence=1024, checkpointing="none"), one_node)
    assert "cluster.nodes: 3" in error.next
    assert "train.checkpointing: full" in error.next


def test_a_model_that_no_number_of_nodes_helps_is_sent_to_tensor_parallelism() -> None:
    wide = ModelShape(hidden=16384, layers=4, heads=128, vocabulary=50_000, positions=32_768)
    error = refusal(train(model=wide, sequence=32_768), P4D)
    assert "a model of 14.2 B parameters" in error.what
    assert "no number of nodes helps" in error.why
    assert "tensor parallelism" in error.next
    assert "cluster.nodes" not in error.next


def test_a_smaller_micro_batch_is_named_where_one_was_asked_for() -> None:
    assert "smaller train.micro_batch" in refusal(train(micro_batch=64), SANDBOX).next


def test_ddp_that_does_not_fit_is_refused_with_what_does() -> None:
    error = refusal(train(strategy="ddp"), SANDBOX)
    assert "strategy ddp" in error.what
    assert "62.8 MiB" in error.why
    assert "mics (fits at p = 2)" in error.next


def test_ddp_beside_a_cluster_that_is_too_small_for_any_p() -> None:
    assert "p = 8, the largest" in refusal(train(strategy="ddp", micro_batch=64), SANDBOX).why


@pytest.mark.parametrize("strategy", ["mics", "ddp"])
def test_an_explicit_partition_size_that_does_not_fit_is_kept_with_a_warning(strategy: str) -> None:
    made = plan(train(strategy=strategy, partition=1), SANDBOX)
    assert made.partition_size == 1
    assert made.train.micro_batch == 1
    assert made.train.checkpointing == "full"
    assert "Warning: p = 1 needs 62.8 MiB" in made.reason


def test_one_device_alone() -> None:
    made = plan(train(), Machines(1, 1, 1 << 30, "cpu", bf16=False))
    assert made.partition_size == 1
    assert made.traffic_bytes == 0
    assert "There is one device." in made.reason


@given(trains, clusters)
def test_every_plan_holds(asked: TrainConfig, machines: Machines) -> None:
    """A plan resolves every `auto`, is a run that the trainer accepts, prints as JSON, and plans to itself."""
    try:
        made = plan(asked, machines)
    except UsageError:
        return  # fits nowhere
    config = RunConfig("r", made.train, machines.nodes, machines.devices_per_node)
    assert (config.grid.partition_size, config.grid.hierarchical) == (made.partition_size, made.hierarchical)
    assert RunConfig.from_json(config.to_json()) == config
    assert json.loads(json.dumps(asdict(made), allow_nan=False))["partition_size"] == made.partition_size

    n, k, p = machines.world_size, machines.devices_per_node, made.partition_size
    assert n % p == 0
    assert k % p == 0 or p % k == 0
    assert made.hierarchical == (asked.strategy == "mics" and p > k > 1)
    assert [c.partition_size for c in made.candidates] == sorted(c.partition_size for c in made.candidates)
    assert made.candidates[-1].partition_size == n
    fits = {c.partition_size: c.fits for c in made.candidates}
    assert fits[p]
    if asked.reshard_after_forward == "auto":
        assert made.train.reshard_after_forward == (asked.strategy != "zero2")
    if asked.strategy in ("mics", "mics-flat"):
        assert not any(fits[q] for q in fits if q < p)
    assert isinstance(made.train.micro_batch, int)
    chosen = estimate(
        shape_of(asked.model),
        partition_size=p,
        micro_batch=made.train.micro_batch,
        sequence=asked.sequence,
        precision=config.precision,
        device=machines.device,
        checkpointing=made.train.checkpointing,  # type: ignore[arg-type]  # no auto is left
        reshard=config.reshard,
        loss_chunk=asked.loss_chunk,
    )
    assert chosen.total <= 0.9 * machines.device_memory_bytes

    again = plan(made.train, machines)
    assert replace(again, reason="") == replace(made, reason="")


@given(trains, clusters)
def test_mics_never_sends_more_than_zero3(asked: TrainConfig, machines: Machines) -> None:
    try:
        made = plan(replace(asked, strategy="mics", reshard_after_forward="auto"), machines)
    except UsageError:
        return
    if machines.nodes > 1 and asked.accumulation > 1:
        assert made.traffic_bytes <= made.traffic_zero3_bytes * (1 + 1e-9)


def test_twenty_billion_parameters_on_eight_p4d() -> None:
    """As the paper has it: a small p, and recomputed activations rather than a group over many nodes."""
    made = plan(train(model="gpt2-20b", sequence=1024), replace(P4D, nodes=8))
    assert (made.partition_size, made.train.micro_batch, made.train.checkpointing) == (16, 8, "full")
    assert "Checkpointing full: the less memory a device needs, the smaller is the p that spans nodes" in made.reason


@pytest.mark.parametrize(
    ("device", "bf16", "precision"), [("A100", True, "bf16"), ("V100", False, "fp16"), ("cpu", False, "fp32")]
)
def test_the_precision_that_the_device_has(device: str, bf16: bool, precision: str) -> None:
    made = plan(train(), Machines(1, 8, 32 << 30, device, bf16=bf16))
    assert made.train.precision == precision
    assert f"Precision {precision}: {device} " in made.reason


def test_zero2_is_zero3_that_gathers_once_a_step() -> None:
    two, three = (plan(train(strategy=name), SANDBOX) for name in ("zero2", "zero3"))
    assert (two.partition_size, two.train.reshard_after_forward, two.hierarchical) == (8, False, False)
    assert (two.train.micro_batch, two.train.checkpointing) == (three.train.micro_batch, three.train.checkpointing)
    assert two.candidates[-1].memory.total > three.candidates[-1].memory.total
    weights = 4 * 3_290_624
    assert two.traffic_bytes == pytest.approx(7 / 8 * weights * (1 + 4))
    assert "until the optimizer step, as strategy zero2 does" in two.reason
    error = refusal(train(strategy="zero2", model="gpt2-20b"), replace(P4D, nodes=8))
    assert "mics (fits at p = 16)" in error.next


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2), (False, 1), (2, 1)])
def test_what_stays_gathered_saves_traffic_and_costs_memory(reshard: bool | int, gathers: int) -> None:
    made, usual = (
        plan(train(partition=4, strategy="mics-flat", reshard_after_forward=kept), SANDBOX) for kept in (reshard, True)
    )
    blocks, root = 4 * 4 * 789_760, 4 * 131_584
    expected = 3 / 4 * 4 * (gathers * blocks + root + blocks + root) + 2 * 1 / 2 * 2 / 4 * (blocks + root)
    assert made.traffic_bytes == pytest.approx(expected)
    assert made.candidates[2].memory.total >= usual.candidates[2].memory.total


@pytest.mark.parametrize("reshard", [0, 3, 4])
def test_a_copy_that_devices_cannot_share_is_refused(reshard: int) -> None:
    error = refusal(train(partition=4, reshard_after_forward=reshard), SANDBOX)
    assert "it may be true, false, 2" in error.why
    assert "train.reshard_after_forward: auto" in error.next


def test_a_chunked_loss_fits_where_a_whole_one_does_not() -> None:
    wordy = ModelShape(hidden=256, layers=4, heads=4, vocabulary=50_000, positions=4096)
    machine = Machines(1, 1, 2 << 30, "cpu", bf16=False)
    wanted = {"model": wordy, "sequence": 4096, "micro_batch": 1}
    assert "does not fit" in refusal(train(**wanted), machine).what
    assert plan(train(**wanted, loss_chunk=256), machine).partition_size == 1


@pytest.mark.parametrize("model", ["my.package:factory", "hf:Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize(
    ("given_", "missing"),
    [
        ({}, "train.partition and train.micro_batch"),
        ({"micro_batch": 1}, "without train.partition"),
        ({"partition": 2}, "without train.micro_batch"),
        ({"strategy": "zero3"}, "without train.micro_batch"),
    ],
)
def test_a_model_that_cannot_be_weighed_needs_both_numbers(model: str, given_: dict[str, Any], missing: str) -> None:
    error = refusal(train(model=model, **given_), SANDBOX)
    assert missing in error.what
    assert "only the nodes can build it" in error.why


@pytest.mark.parametrize(
    ("changes", "p"), [({"partition": 4}, 4), ({"strategy": "zero3"}, 8), ({"strategy": "ddp"}, 1)]
)
def test_the_plan_of_a_model_that_cannot_be_weighed(changes: dict[str, Any], p: int) -> None:
    asked = train(model="my.package:factory", micro_batch=3, **changes)
    made = plan(asked, SANDBOX)
    assert (made.partition_size, made.parameters, made.candidates) == (p, None, ())
    assert (made.traffic_bytes, made.traffic_zero3_bytes) == (None, None)
    assert made.hierarchical == (p == 4)
    assert (made.train.micro_batch, made.train.checkpointing, made.train.precision) == (3, "none", "fp32")
    assert "memory and traffic are not predicted" in made.reason
    config = RunConfig("r", made.train, 4, 2)
    assert RunConfig.from_json(config.to_json()) == config
    assert plan(made.train, SANDBOX).train == made.train
    shown = report(made)
    assert len(shown) == 1
    assert not any("None" in cell for row in shown[0].rows for cell in row)
