"""Names, layouts and configurations of transformers (the library) for our family. Pure.

gpt is GPT2LMHeadModel, bert is MegatronBertForMaskedLM (an encoder with norms before the layers), llama is
LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mics.shapes import Family, ModelShape

TOKEN_TYPES = "bert.embeddings.token_type_embeddings.weight"

_TABLES: Mapping[Family, Mapping[str, tuple[str, ...]]] = {
    "gpt": {
        "tokens": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "norm_attention": ("transformer.h.{}.ln_1",),
        "attention.qkv": ("transformer.h.{}.attn.c_attn",),
        "attention.out": ("transformer.h.{}.attn.c_proj",),
        "norm_feed_forward": ("transformer.h.{}.ln_2",),
        "feed_forward.up": ("transformer.h.{}.mlp.c_fc",),
        "feed_forward.out": ("transformer.h.{}.mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    "bert": {
        "tokens": ("bert.embeddings.word_embeddings",),
        "positions": ("bert.embeddings.position_embeddings",),
        "norm_attention": ("bert.encoder.layer.{}.attention.ln",),
        "attention.qkv": tuple(f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
        "attention.out": ("bert.encoder.layer.{}.attention.output.dense",),
        "norm_feed_forward": ("bert.encoder.layer.{}.ln",),
        "feed_forward.up": ("bert.encoder.layer.{}.intermediate.dense",),
        "feed_forward.out": ("bert.encoder.layer.{}.output.dense",),
        "norm": ("bert.encoder.ln",),
        "head.dense": ("cls.predictions.transform.dense",),
        "head.norm": ("cls.predictions.transform.LayerNorm",),
        "head": ("cls.predictions.decoder",),
    },
    "llama": {
        "tokens": ("model.embed_tokens",),
        "norm_attention": ("model.layers.{}.input_layernorm",),
        "attention.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        "attention.out": ("model.layers.{}.self_attn.o_proj",),
        "norm_feed_forward": ("model.layers.{}.post_attention_layernorm",),
        "feed_forward.gate": ("model.layers.{}.mlp.gate_proj",),
        "feed_forward.up": ("model.layers.{}.mlp.up_proj",),
        "feed_forward.out": ("model.layers.{}.mlp.down_proj",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    },
}


@dataclass(frozen=True)
class Piece:
    """A tensor of transformers that holds rows of one of ours; several, one below the other, make ours.

    rows        of ours that it holds; 0 = all
    transposed  it lies the other way round, as GPT-2's linear layers do there
    copy        a second name under which transformers may keep the same
    plus        a table whose row 0 is to be added to each row: of token types we have one
    """

    name: str
    rows: int = 0
    transposed: bool = False
    copy: str = ""
    plus: str = ""


def pieces(shape: ModelShape, name: str) -> tuple[Piece, ...]:
    """The tensors of transformers that hold our tensor `name`, in the order of our rows."""
    owner, _, kind = name.rpartition(".")
    _, layer, part = owner.split(".", 2) if owner.startswith("blocks.") else ("", "", owner)
    theirs = [f"{prefix.format(layer)}.{kind}" for prefix in _TABLES[shape.family][part]]
    if len(theirs) > 1:
        rows = (shape.hidden, shape.kv_hidden, shape.kv_hidden)
        return tuple(Piece(*piece) for piece in zip(theirs, rows, strict=True))
    linear = part.startswith(("attention", "feed_forward"))
    return (
        Piece(
            theirs[0],
            transposed=shape.family == "gpt" and linear and kind == "weight",
            copy="cls.predictions.bias" if name == "head.bias" else "",
            plus=TOKEN_TYPES if shape.masked and part == "positions" else "",
        ),
    )


def config_of(shape: ModelShape) -> dict[str, Any]:
    """config.json of transformers for this shape."""
    common = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied}
    if shape.family == "gpt":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{ours: getattr(shape, field) for ours, field in _GPT_FIELDS.items()},
            "activation_function": "gelu_new",
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
            **common,
        }
    fields = {theirs: getattr(shape, ours) for theirs, ours in _FIELDS.items()}
    if shape.family == "bert":
        return {
            "architectures": ["MegatronBertForMaskedLM"],
            "model_type": "megatron-bert",
            **fields,
            "layer_norm_eps": shape.norm_eps,
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
            "pad_token_id": None,
            **common,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **fields,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **common,
    }


_GPT_FIELDS = {
    "n_embd": "hidden",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "ffn_hidden",
    "n_positions": "positions",
    "layer_norm_epsilon": "norm_eps",
}
_FIELDS = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_hidden",
    "max_position_embeddings": "positions",
}


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape behind a config.json of transformers. Missing keys have the defaults that transformers gives them.

    Raises ValueError for a model that our family does not hold exactly.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        _require(config, "activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh")
        _require(config, "scale_attn_weights", True, True)
        _require(config, "scale_attn_by_inverse_layer_idx", False, False)
        defaults = {"n_positions": 1024, "n_inner": None, "layer_norm_epsilon": 1e-5}
        values = {ours: config.get(theirs, defaults.get(theirs)) for theirs, ours in _GPT_FIELDS.items()}
        family: Family = "gpt"
        own: dict[str, Any] = {"tied": config.get("tie_word_embeddings", True)}
    elif kind in ("megatron-bert", "llama"):
        values = {ours: config.get(theirs) for theirs, ours in _FIELDS.items()}
        family, own = ("bert", _bert_only(config)) if kind == "megatron-bert" else ("llama", _llama_only(config))
    else:
        raise ValueError(f"model_type {kind!r} is none of gpt2, megatron-bert, llama; train it as hf:FOLDER")
    ffn = values.pop("ffn_hidden") or 0
    missing = [name for name, value in values.items() if value is None]
    if missing or "vocab_size" not in config:
        raise ValueError(f"config.json says nothing of {missing[0] if missing else 'vocab_size'}")
    return ModelShape(
        **values, **own, family=family, vocabulary=config["vocab_size"], ffn=0 if ffn == 4 * values["hidden"] else ffn
    )


def _bert_only(config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "hidden_act", "gelu", "gelu")
    _require(config, "is_decoder", False, False)
    return {"norm_eps": config.get("layer_norm_eps", 1e-12), "tied": config.get("tie_word_embeddings", True)}


def _llama_only(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads") or 1
    _require(config, "hidden_act", "silu", "silu")
    _require(config, "attention_bias", False, False)
    _require(config, "mlp_bias", False, False)
    _require(config, "head_dim", None, None, config.get("hidden_size", 0) // heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"its rotary angles are stretched ({rope}), ours are not; train it as hf:FOLDER")
    kv_heads = config.get("num_key_value_heads") or heads
    return {
        "kv_heads": 0 if kv_heads == heads else kv_heads,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "tied": config.get("tie_word_embeddings", False),
    }


def _require(config: Mapping[str, Any], key: str, default: object, *allowed: object) -> None:
    value = config.get(key, default)
    if value not in allowed:
        raise ValueError(f"its {key} is {value!r}, ours is {allowed[0]!r}; train it as hf:FOLDER")
