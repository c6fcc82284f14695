"""From `train.model` to a model without memory: a preset, a shape, a factory, or a config of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from mics.config import TrainConfig
from mics.errors import RunRefusedError
from mics.models import foreign, huggingface
from mics.models.built import Built
from mics.models.transformer import build_transformer, summed_cross_entropy, summed_loss
from mics.shapes import ModelShape

HF = "hf:"


def build(train: TrainConfig, dtype: torch.dtype) -> Built:
    """The model of this run, its parameters of `dtype` on the meta device: a size of any number builds in seconds.

    Raises RunRefusedError in one line where the model cannot be had or cannot be trained here.
    """
    if train.shape:
        return _own(train, train.shape, dtype)
    name = str(train.model)
    if name.startswith(HF):
        return _foreign(train, dtype, partial(huggingface.make, name.removeprefix(HF), train.sequence, dtype))
    return _foreign(train, dtype, _factory(name, train))


def _own(train: TrainConfig, shape: ModelShape, dtype: torch.dtype) -> Built:
    model = build_transformer(shape, dtype)
    return Built(
        model,
        tuple(model.blocks),
        model.fill,
        partial(summed_loss, loss_chunk=train.loss_chunk),
        vocabulary=shape.vocabulary,
        masked=shape.masked,
        identity=asdict(shape),
        flops_per_token=shape.flops_per_token(train.sequence),
    )


def _factory(name: str, train: TrainConfig) -> Callable[[], object]:
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise RunRefusedError(f"train.model {name}: cannot be imported: {_words(error)}") from error
    if not callable(factory):
        raise RunRefusedError(f"train.model {name} is a {type(factory).__name__}, not a function that makes a model")
    return lambda: factory(train) if _needs_an_argument(factory) else factory()


def _needs_an_argument(factory: Callable[..., object]) -> bool:
    return any(parameter.default is Parameter.empty for parameter in signature(factory).parameters.values())


def _foreign(train: TrainConfig, dtype: torch.dtype, make: Callable[[], object]) -> Built:
    name = f"train.model {train.model}"
    try:
        with foreign.matrices_on_meta(train.seed):
            model = make()
    except RunRefusedError as error:
        raise RunRefusedError(f"{name}: {error}") from error
    except (Exception, SystemExit) as error:  # so may the factory
        raise RunRefusedError(f"{name} raised {_words(error)}") from error
    if not isinstance(model, nn.Module):
        raise RunRefusedError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    vectors = foreign.take_vectors(model)
    without_values = [buffer for buffer, value in model.named_buffers() if value.is_meta]
    if without_values:
        raise RunRefusedError(
            f"{name}: its buffer {without_values[0]} is on the meta device and so has no value; make the model without "
            "a device, its parameters are kept from taking memory anyway"
        )
    vocabulary = getattr(model, "vocabulary", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise RunRefusedError(f"{name}: the number of its token ids is unknown; give the model an attribute vocabulary")
    for key in ("fill", "summed_loss"):
        if not callable(getattr(model, key, callable)):
            raise RunRefusedError(f"{name}: its {key} is a {type(getattr(model, key)).__name__}, not a function")
    flops = getattr(model, "flops_per_token", 0.0)
    if not isinstance(flops, int | float):
        raise RunRefusedError(f"{name}: its flops_per_token is a {type(flops).__name__}, not a number")
    if train.loss_chunk and not hasattr(model, "summed_loss"):
        raise RunRefusedError(f"{name}: train.loss_chunk needs a bundled model, or a model with its own summed_loss")
    model = model.to(dtype)
    blocks = foreign.blocks_of(model, name)
    foreign.check(model, blocks, name)
    return Built(
        model,
        blocks,
        getattr(model, "fill", None) or partial(foreign.fill, vectors, getattr(model, "spread", foreign.SPREAD)),
        _own_loss if hasattr(model, "summed_loss") else partial(_foreign_loss, vocabulary),
        vocabulary=vocabulary,
        masked=bool(getattr(model, "masked", False)),
        identity=foreign.identity(model),
        flops_per_token=flops or foreign.flops_per_token(model),
    )


def _words(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _own_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model.summed_loss(inputs, targets)
    return loss


def _foreign_loss(vocabulary: int, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise RunRefusedError(
            f"train.model: forward of {type(model).__name__} returned a {type(output).__name__}; it must return logits "
            "[batch, sequence, vocabulary], or an object that has them as .logits"
        )
    if logits.shape[:-1] != targets.shape or logits.shape[-1] < vocabulary:
        raise RunRefusedError(
            f"train.model: forward of {type(model).__name__} returned logits {list(logits.shape)}; for token ids "
            f"{list(targets.shape)} and a vocabulary of {vocabulary} they must be {[*targets.shape, vocabulary]}"
        )
    return summed_cross_entropy(logits, targets)
