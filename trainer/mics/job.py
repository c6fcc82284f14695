"""From run.json to everything that training needs: checked on every rank, decided together."""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from mics.checkpoint import Identity, Progress, Saver, TrainState, check_shared, find_resume, load
from mics.config import RunConfig
from mics.data.batches import Batch, load_batch, validation_batches
from mics.data.order import deal
from mics.data.run import RunData, copy_data, mask_token_of, open_data
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.metrics import InterfaceCounter
from mics.models.build import build
from mics.models.built import Built
from mics.models.weights import check_weights, load_weights
from mics.optim import adamw
from mics.paths import on_this_node
from mics.precision import DTYPES, LossScale
from mics.ranks import Place, collective_timeout, every_node, together
from mics.recompute import check_compiler, prepare_blocks
from mics.sharding import Connection, ReplicaMismatchError, apply, check_replicas, connect
from mics.timer import StepTimer
from mics.trial import hierarchical_pays


@dataclass(frozen=True)
class Job:
    """A run, ready to train on this rank."""

    run: RunConfig
    place: Place
    device: torch.device
    connection: Connection
    built: Built
    optimizer: AdamW
    scale: LossScale
    data: RunData
    mask_token: int | None
    interface: InterfaceCounter
    timer: StepTimer
    start: Progress
    saver: Saver | None

    @property
    def model(self) -> nn.Module:
        return self.built.model

    @property
    def state(self) -> TrainState:
        return TrainState(self.model, self.optimizer, self.scale)

    def batches(self, first_sample: int) -> list[Batch]:
        """This rank's micro-steps of the step whose batch starts at `first_sample`, on the CPU."""
        t, place = self.run.train, self.place
        dealt = deal(
            first_sample,
            rank=place.rank,
            world_size=place.world_size,
            micro_batch=self.run.micro_batch,
            accumulation=t.accumulation,
        )
        return [
            load_batch(
                self.data.train,
                samples,
                sequence=t.sequence,
                seed=t.seed,
                vocabulary=self.built.vocabulary,
                mask_token=self.mask_token,
            )
            for samples in dealt
        ]

    def held_out(self) -> Iterator[Batch]:
        """This rank's share of the validation sequences, on the CPU. Only where the run validates."""
        assert self.data.validation is not None
        return validation_batches(
            self.data.validation,
            sequences=self.run.train.validation.sequences,
            sequence=self.run.train.sequence,
            rank=self.place.rank,
            world_size=self.place.world_size,
            micro_batch=self.run.micro_batch,
            vocabulary=self.built.vocabulary,
            mask_token=self.mask_token,
        )


def prepare(run: RunConfig, place: Place, device: torch.device) -> Job:
    """Collective over all ranks. Raises RunRefusedError on all of them where one cannot use its part of the run."""
    t, dtypes = run.train, DTYPES[run.precision]
    check_same(run.to_json(), "another run.json", place)
    if t.checkpoint.every:
        check_shared(node_path(t.checkpoint.path), run_token(place), place)
    built = together(lambda: _built(run), place)
    check_same(fingerprint(built.model), "made another train.model, by parameters or buffers,", place)
    mask_token = mask_token_of(t, vocabulary=built.vocabulary, masked=built.masked)
    data = shared_data(run, built, place)
    identity = Identity(built.identity, {"seed": t.seed, "sequence": t.sequence, "corpus": data.train.digest()})
    own_folder = node_path(run.checkpoint_folder) if t.checkpoint.every else None
    resume = find_resume(own_folder, node_path(run.resume_from) if run.resume_from else None, identity)
    for note in resume.notes:
        say(note, place)
    interface = together(lambda: InterfaceCounter(run.interface, reads=place.local_rank == 0), place)

    run = without_hierarchy_that_loses(run, built, place, device)
    connection = connect(run.grid, device=device.type, timeout=collective_timeout(t.limits))
    assert t.checkpointing != "auto"
    prepare_blocks(built.blocks, checkpointing=t.checkpointing, compile=t.compile)
    timer = StepTimer(device)
    timer.follow(built.blocks)
    apply(
        built.model,
        connection,
        blocks=built.blocks,
        gather_dtype=dtypes.gather,
        reduce_dtype=dtypes.reduce,
        reshard=run.reshard,
    )
    materialise(built.model, built.fill, seed=t.seed, device=device)
    if t.initial and not resume.checkpoint:
        load_weights(built.model, Path(node_path(t.initial)))
    optimizer, scale = adamw(built.model, lr=t.lr, weight_decay=t.weight_decay), LossScale(run.precision, device)
    if resume.checkpoint:
        load(resume.checkpoint, TrainState(built.model, optimizer, scale))
        say(f"goes on from {resume.checkpoint}", place)
    try:
        check_replicas(built.model, connection)
    except ReplicaMismatchError as error:
        raise RunRefusedError(f"train.model: {error}") from error
    saver = Saver(own_folder, identity, t.checkpoint) if own_folder else None
    parts = (run, place, device, connection, built, optimizer, scale, data, mask_token, interface, timer)
    return Job(*parts, resume.progress, saver)


def _built(run: RunConfig) -> Built:
    check_compiler(run.train.compile, os.environ)
    built = build(run.train, DTYPES[run.precision].master)
    if run.train.initial:
        check_weights(built.model, Path(node_path(run.train.initial)))
    return built


def check_same(mine: str, what: str, place: Place) -> None:
    """Raises RunRefusedError on all ranks where one has another text than rank 0. Collective."""
    every = [mine] * place.world_size
    dist.all_gather_object(every, mine)
    other = next((rank for rank, text in enumerate(every) if text != every[0]), None)
    if other is not None:
        raise RunRefusedError(f"rank {other} (node {other // place.local_world_size}) has {what} than rank 0")


def fingerprint(model: nn.Module) -> str:
    """Names and shapes of the parameters, in order, and all buffers: nobody would notice a rank that has others."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad};".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"{name} {tuple(buffer.shape)} {buffer.dtype};".encode())
        digest.update(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shared_data(run: RunConfig, built: Built, place: Place) -> RunData:
    """The data, after a check that it fits the run and is the same on every node. Collective over all ranks."""
    together(lambda: copy_data(run.train, os.environ) if place.local_rank == 0 else None, place)
    data = together(
        lambda: open_data(
            run.train,
            os.environ,
            vocabulary=built.vocabulary,
            global_batch=run.global_batch,
            rank=place.rank,
            world_size=place.world_size,
        ),
        place,
    )
    summaries = every_node(data.summary() if place.local_rank == 0 else "", place)
    for node, summary in enumerate(summaries):
        if summary != summaries[0]:
            raise RunRefusedError(f"train.data: node {node} has other data ({summary}) than node 0 ({summaries[0]})")
    return data


def without_hierarchy_that_loses(run: RunConfig, built: Built, place: Place, device: torch.device) -> RunConfig:
    """The run with flat collectives, where a trial on this network (if one is asked for) shows them to be faster."""
    if not run.trial_seconds or not run.grid.hierarchical:
        return run
    flat = replace(run, train=replace(run.train, hierarchical=False))
    trial = hierarchical_pays(
        run.grid,
        replace(run.grid, hierarchical=False),
        block_bytes=built.block_parameters / len(built.blocks) * DTYPES[run.precision].gather.itemsize,
        seconds=run.trial_seconds,
        device=device,
    )
    say(
        f"a block's gather and reduce-scatter: flat {trial.flat_seconds * 1e3:.2f} ms, hierarchical "
        f"{trial.hierarchical_seconds * 1e3:.2f} ms (median of {trial.repeats}); this run is "
        f"{'hierarchical' if trial.pays else 'flat'}",
        place,
    )
    return run if trial.pays else flat


def say(text: str, place: Place) -> None:
    """A line for the reader, from rank 0. In one piece: print would let another rank write into it."""
    if place.rank == 0:
        sys.stderr.write(f"mics: {text}\n")


def run_token(place: Place) -> str:
    """What rank 0 writes below the checkpoint path: never the same twice, so that an old file proves nothing."""
    return every_node(uuid.uuid4().hex, place)[0]


def node_path(path: str) -> str:
    return on_this_node(path, os.environ)
