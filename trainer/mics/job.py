"""From run.json to everything that training needs: checked on every rank, decided together."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from mics.checkpoint import Progress, check_shared, load, to_resume
from mics.config import RunConfig
from mics.data import Corpus, check_corpus, deal, find_files, load_batch, open_corpus
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.metrics import InterfaceCounter
from mics.models.gpt import GPT, IGNORED, build_on_meta
from mics.optim import adamw
from mics.paths import on_this_node
from mics.precision import DTYPES
from mics.ranks import Place, every_node, together
from mics.sharding import Connection, apply, check_replicas, connect

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """A run, ready to train on this rank."""

    run: RunConfig
    place: Place
    device: torch.device
    connection: Connection
    model: GPT
    optimizer: AdamW
    corpus: Corpus
    interface: InterfaceCounter
    start: Progress


def prepare(run: RunConfig, place: Place, device: torch.device) -> Job:
    """Collective over all ranks. Raises RunRefusedError on all of them where one cannot use its part of the run."""
    t, dtypes = run.train, DTYPES[run.precision]
    if t.checkpoint.every:
        check_shared(node_path(t.checkpoint.path), run_token(place), place)
    corpus = shared_corpus(run, place)
    resume = together(lambda: to_resume(node_path(run.resume_from), t.shape) if run.resume_from else None, place)
    interface = together(lambda: InterfaceCounter(run.interface if place.local_rank == 0 else None), place)

    connection = connect(run.grid, device=device.type)
    model = build_on_meta(t.shape, dtypes.master)
    apply(model, connection, blocks=model.blocks, gather_dtype=dtypes.gather, reduce_dtype=dtypes.reduce)
    materialise(model, model.fill, seed=t.seed, device=device)
    optimizer = adamw(model, lr=t.lr, weight_decay=t.weight_decay)
    start = load(resume, model, optimizer) if resume else Progress()
    check_replicas(model, connection)
    return Job(run, place, device, connection, model, optimizer, corpus, interface, start)


def shared_corpus(run: RunConfig, place: Place) -> Corpus:
    """The corpus, after a check that it fits the run and is the same on every node. Collective over all ranks."""

    def checked() -> Corpus:
        corpus = open_corpus(find_files(run.train.data, os.environ))
        check_corpus(
            corpus.size,
            vocabulary=run.train.shape.vocabulary,
            sequence=run.train.sequence,
            global_batch=run.global_batch,
        )
        return corpus

    corpus = together(checked, place)
    mine = f"{len(corpus.files)} files, {corpus.size} bytes, sha256 {corpus.digest()}" if place.local_rank == 0 else ""
    texts = every_node(mine, place)
    for node, text in enumerate(texts):
        if text != texts[0]:
            raise RunRefusedError(f"train.data: node {node} has other data ({text}) than node 0 ({texts[0]})")
    return corpus


def run_token(place: Place) -> str:
    """What rank 0 writes below the checkpoint path: never the same twice, so that an old file proves nothing."""
    return every_node(uuid.uuid4().hex, place)[0]


def node_path(path: str) -> Path:
    return Path(on_this_node(path, os.environ))


def next_batches(job: Job, progress: Progress) -> list[Batch]:
    t, place = job.run.train, job.place
    dealt = deal(
        progress.samples,
        rank=place.rank,
        world_size=place.world_size,
        micro_batch=job.run.micro_batch,
        accumulation=t.accumulation,
    )
    loaded = (load_batch(job.corpus, samples, sequence=t.sequence, seed=t.seed) for samples in dealt)
    return [(inputs.to(job.device), targets.to(job.device)) for inputs, targets in loaded]


def valid_tokens(batches: Sequence[Batch]) -> Tensor:
    """Valid targets of all ranks and micro-steps, a scalar on the device. Collective over all ranks."""
    count = torch.stack([(targets != IGNORED).sum() for _, targets in batches]).sum()
    dist.all_reduce(count)
    return count
