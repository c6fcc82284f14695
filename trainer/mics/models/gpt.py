"""The names of the model before it became a family."""

from mics.models.built import IGNORED
from mics.models.transformer import Transformer as GPT
from mics.models.transformer import build_transformer as build_on_meta
from mics.models.transformer import summed_loss

__all__ = ["GPT", "IGNORED", "build_on_meta", "summed_loss"]
