"""The errors of the trainer that are the user's to solve. Standard library only."""

from __future__ import annotations


class RunRefusedError(Exception):
    """run.json, the data or the checkpoint path cannot be used. One readable line; the trainer prints it, exits 2."""


class RunFolderError(Exception):
    """This rank cannot write into the run's folder on its node; the others do not know. One readable line."""
