"""Read a whole checkpoint into a run of any n, p and strategy; every rank reads only its own shards."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from mics.checkpoint.agree import first_failure, on_every_rank
from mics.checkpoint.files import StoreReader
from mics.checkpoint.states import TrainState, put_back, targets
from mics.checkpoint.stores import open_store
from mics.errors import RunRefusedError


def load(checkpoint: str, state: TrainState, group: dist.ProcessGroup | None = None) -> None:
    """Read weights, optimizer state and loss scale of the checkpoint at `checkpoint`. Collective over all ranks.

    Memory beside the run's own: one saved chunk of one tensor, twice. Raises RunRefusedError on every rank where the
    checkpoint holds another model or cannot be read.
    """
    parent, _, folder = checkpoint.rstrip("/").rpartition("/")
    reader = on_every_rank(lambda: StoreReader(open_store(parent), folder), group, RunRefusedError)
    metadata = on_every_rank(reader.read_metadata, group, RunRefusedError)
    wanted = targets(state, metadata.state_dict_metadata, checkpoint)
    try:
        state_dict_loader.load(dict(wanted), storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise RunRefusedError(f"{checkpoint} cannot be loaded: {first_failure(error)}") from error
    put_back(state, wanted)
