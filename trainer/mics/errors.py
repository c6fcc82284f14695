"""The one error of the trainer that is the user's to solve. Standard library only."""

from __future__ import annotations


class RunRefusedError(Exception):
    """run.json, the data or the checkpoint path cannot be used. One readable line; the trainer prints it, exits 2."""
