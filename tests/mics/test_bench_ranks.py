"""Contenders on four ranks that stand for two nodes: they train the same, and send what the formulas say."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from mics.bench.__main__ import bench
from mics.config import RunConfig, TrainConfig
from mics.entries import BenchConfig, Entry, traffic_bytes
from mics.ranks import Place
from mics.shapes import ModelShape
from mics.strategies import STRATEGIES
from mics.traffic import crosses_node
from torch.nn import functional

pytestmark = pytest.mark.distributed

NODES, DEVICES = 2, 2
RANKS = NODES * DEVICES
SMALL = ModelShape(hidden=16, layers=2, heads=2, positions=16, vocabulary=64)
# each matrix has more than 1e5 elements: DeepSpeed keeps smaller parameters gathered
WIDE = ModelShape(hidden=320, layers=2, heads=4, positions=320, vocabulary=320)

OURS = [
    Entry("zero3", "zero3", 4),
    Entry("zero3, native", "zero3", 4, reduce_scatter="native"),
    Entry("zero3, direct", "zero3", 4, reduce_scatter="direct"),
    Entry("mics p=2", "mics", 2),
    Entry("mics p=2, hop 2 every micro-step", "mics", 2, hop2_every_micro_step=True),
    Entry("mics p=4", "mics", 4, hierarchical=True),
    Entry("zero2", "zero2", 4),
    Entry("ddp", "ddp", 1),
]
FSDP2 = [
    Entry("fsdp2", "fsdp2", 4),
    Entry("hsdp", "fsdp2-hsdp", 2),
    Entry("hsdp, hop 2 every micro-step", "fsdp2-hsdp", 2, hop2_every_micro_step=True),
]
DEEPSPEED = [
    Entry("zero3", "zero3", 4, micro_steps=2),
    Entry("hpz", "deepspeed-hpz", 4, micro_steps=2),
    Entry("deepspeed", "deepspeed-zero3", 4, micro_steps=2),
    Entry("deepspeed, second gather", "deepspeed-zero3", 4, micro_steps=2, second_gather=True),
]


# Passes of a ring over the message; DeepSpeed calls the old names.
RINGS = {
    "all_gather_single": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_single": 2,
    "reduce_scatter_tensor": 2,
    "all_reduce": 2,
}


class Wire:
    """Bytes that this rank sends to the other node in the collectives of torch.distributed.

    In group order, as gloo's rings are; its reduce-scatter is an all-reduce inside.
    """

    def __init__(self):
        self.sent_bytes, self._inside = 0.0, threading.local()
        for name, passes in RINGS.items():
            self._watch(name, lambda size, ranks, passes=passes: passes * self._ring(size, ranks))
        self._watch("all_to_all_single", self._direct)
        isend = dist.isend

        def watched(tensor, dst=None, group=None, tag=0, group_dst=None):
            peer = dst if group_dst is None else dist.get_global_rank(group, group_dst)
            if peer // DEVICES != dist.get_rank() // DEVICES:
                self.sent_bytes += tensor.numel() * tensor.element_size()
            return isend(tensor, dst, group, tag, group_dst)

        dist.isend = watched

    def _watch(self, name, cost):
        collective = getattr(dist, name)

        def watched(*arguments, **named):
            values = (*arguments, *named.values())
            if not getattr(self._inside, "on", False):  # deprecated names call the new ones
                size = max(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
                group = next((v for v in values if isinstance(v, dist.ProcessGroup)), dist.group.WORLD)
                self.sent_bytes += cost(size, tuple(dist.get_process_group_ranks(group)))
            before, self._inside.on = getattr(self._inside, "on", False), True
            try:
                return collective(*arguments, **named)
            finally:
                self._inside.on = before

        setattr(dist, name, watched)

    def _ring(self, size, ranks):
        return size * (len(ranks) - 1) / len(ranks) if crosses_node(dist.get_rank(), ranks, DEVICES) else 0.0

    def _direct(self, size, ranks):
        return size / len(ranks) * sum(rank // DEVICES != dist.get_rank() // DEVICES for rank in ranks)


def measured(entries, shape, folder, config=None):
    """This rank's bytes to the other node by entry, in the last of the rounds."""
    rank, plain = dist.get_rank(), functional.linear
    place = Place(rank, rank % DEVICES, RANKS, DEVICES)
    names = {"RANK": rank, "LOCAL_RANK": place.local_rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": DEVICES}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    wire, sent, marks = Wire(), {}, []

    def at(step, phase, *, long=False):
        marks.append((phase, wire.sent_bytes))

    bench(run_of(shape), config or BenchConfig(tuple(entries), 1, 2), folder, place, torch.device("cpu"), at)
    at(0, "end")
    for (phase, before), (_, after) in pairwise(marks):
        sent[phase] = after - before
    assert functional.linear is plain
    return sent


def run_of(shape):
    train = TrainConfig(
        model=shape,
        strategy="ddp",
        partition=1,
        hierarchical=False,
        micro_batch=1,
        sequence=16,
        lr=0.16 / shape.hidden,  # wide layers diverge at what narrow ones need
        precision="fp32",
        checkpointing="none",
        reshard_after_forward=True,
    )
    return RunConfig("bench", train, NODES, DEVICES)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_losses(lines):
    """Equal in every round, and something is learnt."""
    by_round = {}
    for line in lines:
        by_round.setdefault(line["round"], []).append(line["loss"])
    assert all(max(losses) - min(losses) <= 1e-4 * min(losses) for losses in by_round.values())
    assert by_round[max(by_round)][0] < by_round[1][0] - 0.05


def formula(entry, shape, **more):
    return traffic_bytes(
        entry,
        nodes=NODES,
        devices_per_node=DEVICES,
        block_bytes=4 * shape.layers * shape.block_parameters,
        root_bytes=4 * shape.root_parameters,
        **more,
    )


def test_ours_and_fsdp2_train_alike_and_send_what_the_formulas_say(run_ranks, tmp_path):
    entries = [replace(entry, micro_steps=2) for entry in [*OURS, *FSDP2]]
    by_rank = run_ranks(measured, ranks=RANKS, deadline_s=120, entries=entries, shape=SMALL, folder=tmp_path)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 1 + 3 * len(entries)))
    assert Counter(line["entry"] for line in lines) == dict.fromkeys((entry.name for entry in entries), 3)
    assert [line["warmup"] for line in lines] == [True] * len(entries) + [False] * 2 * len(entries)
    check_losses(lines)
    counted = {line["entry"]: line["counted_bytes"] for line in lines if line["round"] == 3}
    for entry in entries:
        expected = formula(entry, SMALL)
        # the count of tokens, the norm, the line of the step
        assert sum(sent[entry.name] for sent in by_rank) / NODES == pytest.approx(expected, abs=500), entry.name
        own = entry.strategy in STRATEGIES and entry.reduce_scatter == "ring"
        assert counted[entry.name] == (pytest.approx(expected, abs=1) if own else None), entry.name


@pytest.mark.slow  # each rank imports DeepSpeed, and with it torch's compiler: seconds
def test_deepspeed_trains_as_we_do_and_sends_what_the_formulas_say(run_ranks, tmp_path):
    """hpZ first: its groups must not reach the engines after it."""
    by_rank = run_ranks(measured, ranks=RANKS, deadline_s=240, entries=DEEPSPEED, shape=WIDE, folder=tmp_path)
    check_losses(lines_of(tmp_path))
    for entry in DEEPSPEED:
        expected = formula(entry, WIDE, kept_bytes=4 * WIDE.hidden * WIDE.ffn_hidden)
        sent = sum(sent[entry.name] for sent in by_rank) / NODES
        assert sent == pytest.approx(expected, rel=0.005), entry.name


def test_the_program(start_trainers, tmp_path):
    """One after the other, with emulated computation."""
    run = replace(run_of(SMALL), nodes=1)
    entries = (Entry("mics", "mics", 2, micro_steps=2), Entry("ddp", "ddp", 1, micro_steps=2))
    config = BenchConfig(entries, 0, 1, together=False, emulated_compute_seconds=0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "bench.json").write_text(config.to_json())
    process = start_trainers(run, program="mics.bench.__main__", deadline_s=100)
    stdout, stderr = process.communicate(timeout=110)
    *said, codes = stdout.splitlines()
    assert json.loads(codes) == [0, 0], stderr
    lines = lines_of(folder)
    assert [line["entry"] for line in lines] == ["mics", "ddp"]
    assert all(line["step_seconds"] >= 0.4 and line["loss"] > 0 for line in lines)
    assert said[-1].startswith("step 2/2  round 1  ddp  ")


def test_what_one_node_cannot_have_ends_all_ranks_with_one_line(start_trainers, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "bench.json").write_text(BenchConfig((Entry("mics", "mics", 3),)).to_json())
    process = start_trainers(replace(run_of(SMALL), nodes=1), program="mics.bench.__main__", deadline_s=100)
    stdout, stderr = process.communicate(timeout=110)
    assert json.loads(stdout.splitlines()[-1]) == [2, 2]
    assert [line for line in stderr.splitlines() if line.startswith("mics: ")] == [
        "mics: node 0: entry mics: partition size 3 does not divide the world size 2; it may be 1, 2"
    ]
    assert not (folder / "metrics.jsonl").exists()
