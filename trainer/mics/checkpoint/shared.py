"""Whether every rank sees the checkpoint path."""

from __future__ import annotations

import time

from mics.checkpoint.agree import readable_reason
from mics.checkpoint.stores import Store, open_store
from mics.errors import RunRefusedError
from mics.ranks import Place, together

TOKEN_SECONDS = 10.0  # how long a new file may take until other nodes see it


def check_shared(path: str, token: str, place: Place) -> None:
    """Rank 0 writes `token` below `path` and every rank must read it. Raises RunRefusedError on all ranks otherwise.

    Collective over all ranks. `token` is any text that no earlier attempt has used.
    """
    store, file = together(lambda: open_store(path), place), f".mics-{token}"
    together(lambda: _write_token(store, file, token) if place.rank == 0 else None, place)
    together(lambda: _read_token(store, file, token), place)
    if place.rank == 0:
        store.remove_file(file)


def _write_token(store: Store, file: str, token: str) -> None:
    try:
        store.make_folder("")
        store.write(file, token.encode())
    except (OSError, RunRefusedError) as error:
        reason = readable_reason(error)
        raise RunRefusedError(f"train.checkpoint.path {store.location} cannot be written: {reason}") from error


def _read_token(store: Store, file: str, token: str) -> None:
    deadline = time.monotonic() + TOKEN_SECONDS
    while not (store.exists(file) and store.read(file) == token.encode()):
        if time.monotonic() > deadline:
            raise RunRefusedError(
                f"train.checkpoint.path {store.location} is not shared: this node does not see what rank 0 wrote "
                "there. Use a folder that every node sees, such as one below /fsx, or s3://bucket/prefix"
            )
        time.sleep(0.1)
