"""Models of transformers by their configuration. The only file that imports transformers, which few runs need."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from mics.errors import RunRefusedError
from mics.models.foreign import SPREAD, flops_per_token
from mics.paths import on_this_node

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def make(source: str, sequence: int, dtype: torch.dtype) -> Any:
    """The language model of a config.json, its folder, or a name in the local cache of the hub; nothing is downloaded.

    Raises RunRefusedError where transformers is missing, knows no such model, or where it cannot be trained here.
    """
    try:
        from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    except ImportError as error:
        raise RunRefusedError(
            f"transformers is not installed: {sys.executable} -m pip install 'transformers>=5,<6'"
        ) from error
    source = on_this_node(source, os.environ)
    if source.startswith(("/", ".")) and not Path(source).exists():
        raise RunRefusedError("there is no such file or folder on this node")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RunRefusedError(f"transformers cannot read its configuration: {str(error).splitlines()[0]}") from error
    check(config, sequence)
    config.use_cache = False  # a cache of keys would be filled again by the recomputation in the backward pass
    masked = is_masked(config, MODEL_FOR_MASKED_LM_MAPPING)
    maker: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = maker.from_config(config, dtype=dtype)  # it takes scaled_dot_product_attention where it can
    model.vocabulary, model.masked = config.vocab_size, masked
    model.spread = getattr(config, "initializer_range", SPREAD)
    scores = 4.0 * config.num_hidden_layers * config.hidden_size * sequence  # as in mics.shapes
    model.flops_per_token = flops_per_token(model) + scores
    return model


def check(config: Any, sequence: int) -> None:
    """Raises RunRefusedError for a model of several experts or stacks, or with too few positions."""
    experts = max(int(getattr(config, key, 0) or 0) for key in EXPERTS)
    if experts > 1:
        raise RunRefusedError(
            f"it is a mixture of {experts} experts, which needs expert parallelism; Megatron-LM and torchtitan have it"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise RunRefusedError("it has an encoder and a decoder; models of one stack can be trained")
    positions = getattr(config, "max_position_embeddings", None)
    if positions and sequence > positions:
        raise RunRefusedError(f"sequence {sequence} is longer than the model's {positions} positions")


def is_masked(config: Any, masked_models: Any) -> bool:
    """Whether to train it as an encoder: as its architecture says, else where transformers has it as one."""
    for architecture in getattr(config, "architectures", None) or ():
        return "MaskedLM" in architecture
    return type(config) in masked_models and not getattr(config, "is_decoder", False)
