"""TensorBoard, as an extra beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mics.errors import RunRefusedError


class Board:
    """Writes every number of a record as a scalar of its step. Raises RunRefusedError where tensorboard is missing.

    start  steps that the run has already done: what an earlier attempt wrote after them is hidden
    """

    def __init__(self, folder: Path, *, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # imports tensorboard, which is not in every image
        except ImportError as error:
            raise RunRefusedError(
                f"train.tensorboard is on, but {error.name or error} is not installed on this node. "
                "Try: pip install 'tensorboard>=2.18', or set train.tensorboard: false"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, number in scalars(record).items():
            self._writer.add_scalar(name, number, record["step"])

    def close(self) -> None:
        self._writer.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, those of an inner object as outer/inner. Text and null are left out. Pure."""
    inner = {
        f"{name}/{key}": number for name, of in record.items() if isinstance(of, Mapping) for key, number in of.items()
    }
    return {
        name: float(number)
        for name, number in {**record, **inner}.items()
        if isinstance(number, int | float) and name != "step"
    }
