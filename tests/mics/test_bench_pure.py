"""The parts of a benchmark that need no other rank."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mics.bench import emulated
from mics.bench.__main__ import check, main, readable
from mics.bench.deepspeed import zero_config
from mics.bench.emulated import Device, emulate
from mics.bench.rounds import Measured, Turn, record, schedule
from mics.bench.tokens import random_batches
from mics.entries import BenchConfig, Entry
from mics.errors import RunRefusedError
from torch import nn
from torch.utils.checkpoint import checkpoint


def entries(count):
    return tuple(Entry(f"e{index}", "ddp", 1) for index in range(count))


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 8), st.booleans())
def test_every_entry_has_one_step_in_each_round(count, warmup, steps, together):
    made = list(schedule(BenchConfig(entries(count), warmup, steps, together)))
    assert Counter((turn.round, turn.entry.name) for turn in made) == Counter(
        (number, f"e{index}") for number in range(1, warmup + steps + 1) for index in range(count)
    )


def test_no_entry_always_follows_the_same_one():
    made = [turn.entry.name for turn in schedule(BenchConfig(entries(3), 0, 6))]
    before = {name: {a for a, b in pairwise(made) if b == name} for name in made}
    assert all(len(found) > 1 for found in before.values())
    assert [turn.entry.name for turn in schedule(BenchConfig(entries(2), 0, 4))] == [
        *("e0", "e1", "e1", "e0"),
        *("e1", "e0", "e0", "e1"),
    ]


def test_one_after_the_other():
    made = [(turn.entry.name, turn.round) for turn in schedule(BenchConfig(entries(2), 1, 1, together=False))]
    assert made == [("e0", 1), ("e0", 2), ("e1", 1), ("e1", 2)]


def batches(step=1, *, rank=0, world_size=1, micro_steps=1, seed=0):
    return random_batches(
        step,
        rank=rank,
        world_size=world_size,
        micro_batch=2,
        micro_steps=micro_steps,
        sequence=5,
        vocabulary=11,
        seed=seed,
    )


@given(st.integers(1, 4), st.integers(1, 3))
def test_the_ranks_share_one_global_batch(world_size, micro_steps):
    dealt = [batches(rank=rank, world_size=world_size, micro_steps=micro_steps) for rank in range(world_size)]
    together = torch.cat([dealt[rank][micro][0] for micro in range(micro_steps) for rank in range(world_size)])
    alone = torch.cat([inputs for inputs, _ in batches(micro_steps=world_size * micro_steps)])
    assert together.equal(alone)


def test_tokens_depend_on_seed_and_step_alone_and_targets_are_the_next_ones():
    ((inputs, targets),) = batches()
    assert inputs.shape == targets.shape == (2, 5)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert 0 <= inputs.min() <= inputs.max() < 11
    assert batches()[0][0].equal(inputs)
    assert not batches(step=2)[0][0].equal(inputs)
    assert not batches(seed=1)[0][0].equal(inputs)


class Clock:
    """In place of the module `time`: a computation takes as long as it says, and sleeping is noted."""

    def __init__(self):
        self.now, self.slept = 0.0, 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


class Slow(torch.autograd.Function):
    """Takes 1 s forward and 2 s backward."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        ctx.save_for_backward(x)
        clock.now += 1
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors  # a checkpoint computes again when somebody asks for what was saved
        ctx.clock.now += 2
        return gradient * 2, None


class Block(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        return Slow.apply(x, self.clock)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    return clock


@pytest.mark.parametrize(("seconds", "taken"), [(18.0, 18.0), (9.0, 9.0), (3.0, 9.0)])
def test_blocks_take_their_share_of_the_time_and_never_more_than_they_compute(clock, seconds, taken):
    blocks = [Block(clock) for _ in range(3)]
    emulate(blocks, seconds, Device())
    x = torch.ones((), requires_grad=True)
    out = nn.Sequential(*blocks)(x)
    assert clock.now == pytest.approx(taken / 3)
    out.backward()
    assert clock.now == pytest.approx(taken)
    assert clock.slept == pytest.approx(taken - 9)
    assert x.grad == 8


def test_what_is_computed_again_belongs_to_the_backward_pass(clock):
    block = Block(clock)
    inner = block.forward
    block.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    emulate([block], 30.0, Device())
    block(torch.ones((), requires_grad=True)).backward()
    assert (clock.now, clock.slept) == (pytest.approx(30), pytest.approx(30 - 4))


def test_what_comes_before_a_block_s_backward_pass_is_not_its_time(clock):
    """FSDP2 hangs its wait for the gather on the output of a block."""
    block = Block(clock)
    emulate([block], 30.0, Device())
    out = block(torch.ones((), requires_grad=True))
    out.register_hook(lambda _: clock.sleep(5))
    out.backward()
    assert clock.now == pytest.approx(35)


@pytest.mark.parametrize(
    ("host", "collectives", "taken"),
    [
        (4.0, 0.0, 4 + 90.0),  # but for the first, the device has not yet finished the block before
        (4.0, 6.0, 90.0 + 3 * 6.0),  # waits for gathers are not hidden, one before each block
        (40.0, 0.0, 3 * 40.0 + 10.0 + 60.0),  # a host that cannot keep up delays the forward pass
    ],
)
def test_the_host_s_work_hides_under_compute_and_waits_for_collectives_do_not(clock, host, collectives, taken):
    waited = []

    def before():
        clock.now += host + collectives
        waited.append(collectives)

    def exposed():
        total = sum(waited)
        waited.clear()
        return total

    device = Device()
    device.restart(exposed)
    blocks = [Block(clock) for _ in range(3)]
    emulate(blocks, 90.0, device)
    x = torch.ones((), requires_grad=True)
    for block in blocks:
        before()
        x = block(x)
    x.backward()
    assert clock.now == pytest.approx(taken)


def test_a_forward_pass_without_gradients_takes_its_third(clock):
    block = Block(clock)
    emulate([block], 30.0, Device())
    with torch.no_grad():
        block(torch.ones(()))
    assert clock.now == pytest.approx(10)


def test_blocks_that_return_no_tensor_are_refused():
    block = nn.Identity()
    emulate([block], 1.0, Device())
    with pytest.raises(RunRefusedError, match="not tuple"):
        block((torch.ones(()),))


def test_a_line_of_metrics(tiny_run):
    run = tiny_run(nodes=2, devices=2, accumulation=7)
    config, entry = BenchConfig((Entry("a", "zero3", 4, micro_steps=3),), warmup_steps=1), Entry("a", "zero3", 4)
    line = record(5, Turn(1, entry), Measured(0.5, 5.25, 1e6, None), config, run)
    assert line == {
        "step": 5,
        "round": 1,
        "warmup": True,
        "entry": "a",
        "step_seconds": 0.5,
        "loss": 5.25,
        "traffic_bytes": 1e6,
        "counted_bytes": None,
        "samples": 16,
        "tokens_per_second": 16 * 16 / 0.5,
    }
    assert readable(line, steps=9) == "step 5/9  round 1 (warm-up)  a  0.50 s  loss 5.2500  sent 1.0 MB/node"
    bad = record(6, Turn(2, entry), Measured(0.5, float("nan"), None, None), config, run)
    assert (bad["loss"], bad["warmup"]) == (None, False)
    assert readable(bad, steps=9) == "step 6/9  round 2  a  0.50 s  loss nan"


def test_deepspeed_gets_its_defaults_unless_the_second_gather_is_forced(tiny_run):
    run = tiny_run(nodes=2, devices=2)
    plain = zero_config(Entry("a", "deepspeed-zero3", 4), run, block_parameters=1000)
    assert plain["zero_optimization"] == {"stage": 3}
    assert (plain["gradient_accumulation_steps"], plain["gradient_clipping"]) == (4, 1.0)
    forced = zero_config(Entry("a", "deepspeed-zero3", 4, second_gather=True), run, block_parameters=1000)
    assert forced["zero_optimization"]["stage3_max_reuse_distance"] == 0
    hpz = zero_config(Entry("a", "deepspeed-hpz", 4), run, block_parameters=1000)
    assert hpz["zero_optimization"]["zero_hpz_partition_size"] == 2


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("entry", "train", "words"),
    [
        (Entry("a", "mics", 3), {}, "entry a: partition size 3 does not divide"),
        (Entry("a", "deepspeed-zero3", 4), {"precision": "fp64"}, "entry a: DeepSpeed is compared in fp32 and bf16"),
        (Entry("a", "fsdp2", 4), {"precision": "fp16"}, "entry a: FSDP2 as it comes has no loss scale"),
    ],
)
def test_entries_that_these_nodes_cannot_have_are_refused(tiny_run, entry, train, words):
    with pytest.raises(RunRefusedError, match=words):
        check(BenchConfig((entry,)), tiny_run(**train), CPU)


def test_a_missing_deepspeed_is_named_with_its_extra(tiny_run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunRefusedError, match=r"micsctl\[bench\]"):
        check(BenchConfig((Entry("a", "deepspeed-hpz", 4),)), tiny_run(), CPU)


def test_computation_is_not_emulated_on_gpus(tiny_run):
    with pytest.raises(RunRefusedError, match="GPU"):
        check(BenchConfig(entries(1), emulated_compute_seconds=1.0), tiny_run(), torch.device("cuda"))


def test_the_program_refuses_in_one_line(tiny_run, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "run.json"
    assert main(["--config", str(config)]) == 2
    assert "run.json" in capsys.readouterr().err
    config.write_text(tiny_run().to_json())
    (tmp_path / "bench.json").write_text('{"entries": [{"name": "a"}]}')
    assert main(["--config", str(config)]) == 2
    assert "bench.json" in capsys.readouterr().err
    (tmp_path / "bench.json").write_text(BenchConfig(entries(1)).to_json())
    assert main(["--config", str(config)]) == 2
    assert "torchrun" in capsys.readouterr().err
