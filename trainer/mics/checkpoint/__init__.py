"""Checkpoints that every node sees, at `<folder>/step-<N>`, for any n, p and strategy.

A checkpoint is whole when its mark (`complete.json`) is there and every file that it lists is as its writer left it.
The mark is written last, and no save writes into the folder of another: a killed save never hurts an older checkpoint.
"""

from mics.checkpoint.marks import MARK, Identity, Progress
from mics.checkpoint.reading import load
from mics.checkpoint.resume import Resume, find_resume
from mics.checkpoint.saver import Outcome, Saver
from mics.checkpoint.shared import check_shared
from mics.checkpoint.states import TrainState
from mics.checkpoint.writing import SaveFailedError

__all__ = [
    "MARK",
    "Identity",
    "Outcome",
    "Progress",
    "Resume",
    "SaveFailedError",
    "Saver",
    "TrainState",
    "check_shared",
    "find_resume",
    "load",
]
