"""Families of models: what each asks of the one transformer, by the name in `architectures` of its config.json.

A family is the defaults of its config.json where they are not Llama's, the keys of which it computes one value only,
and a function from the keys to switches of the transformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefix_jax.checkpoint import eos_ids_of
from prefix_jax.models.rope import rope_settings

Keys = Mapping[str, Any]
Switches = dict[str, Any]

_ONE_VALUE = {  # of keys that no family computes otherwise
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_bidirectional_attention": False,
}
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """model_type: as in config.json, when that names no architecture. defaults: of keys that may be left out."""

    model_type: str
    defaults: Keys = field(default_factory=dict)
    switches: Callable[[Keys], Switches] = lambda keys: {}


def settings(config: Keys) -> Switches:
    """The arguments of LlamaConfig, from the contents of a config.json. ValueError names whatever the transformer does
    not compute."""
    family = _family(config)
    stated = {**family.defaults, **config}
    keys = _DEFAULTS | {key: value for key, value in stated.items() if value is not None}
    for key, known in _ONE_VALUE.items():
        if (got := keys.get(key, known)) != known:
            raise ValueError(f"{key} = {got!r} is not supported; known: {known!r}")
    if (activation := keys.get("hidden_activation", keys["hidden_act"])) not in _ACTIVATIONS:
        raise ValueError(f"hidden_act = {activation!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    if missing := [key for key in _REQUIRED if key not in keys]:
        raise ValueError(f"config lacks {', '.join(missing)}")
    heads, hidden = keys["num_attention_heads"], keys["hidden_size"]
    if "head_dim" not in keys and (heads < 1 or hidden % heads):
        raise ValueError(f"hidden_size {hidden} over {heads} heads is no integer, and head_dim is not stated")
    keys.setdefault("head_dim", hidden // max(heads, 1))
    values = {
        "vocab_size": keys["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": keys["intermediate_size"],
        "num_layers": keys["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", heads),
        "head_dim": keys["head_dim"],
        "max_position": keys["max_position_embeddings"],
        "rms_norm_eps": keys["rms_norm_eps"],
        "tie_word_embeddings": keys["tie_word_embeddings"],
        "bos_id": keys.get("bos_token_id"),
        "eos_ids": tuple(eos_ids_of(keys)),
        "activation": _ACTIVATIONS[activation],
    }
    switches = family.switches(keys)
    if "rope_theta" not in switches and not switches.get("alibi"):
        switches |= _rope(keys, keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    return values | switches


def _family(config: Keys) -> Family:
    names, kind = config.get("architectures"), config.get("model_type")
    if names is not None and (len(names) != 1 or names[0] not in FAMILIES):
        raise ValueError(f"architectures = {names!r} is not supported; known: {', '.join(FAMILIES)}")
    known = {family.model_type: family for family in ([FAMILIES[names[0]]] if names else FAMILIES.values())}
    if kind is None:  # written by hand
        kind = next(iter(known))
    if kind not in known:
        raise ValueError(f"model_type = {kind!r} is not supported; known: {', '.join(known)}")
    return known[kind]


def _rope(keys: Keys, rope: Keys) -> Switches:
    """`rope`: rope_parameters of transformers 5, or rope_scaling of what was before it."""
    if (turned := rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor = {turned!r} is not supported; known: 1.0")
    theta = rope.get("rope_theta") or keys["rope_theta"]
    if "original_max_position_embeddings" in keys:  # Phi-3 has it beside the other keys
        rope = {"original_max_position_embeddings": keys["original_max_position_embeddings"], **rope}
    return rope_settings(rope, theta, keys["head_dim"], keys["max_position_embeddings"])


def _window(keys: Keys, is_local: Callable[[int], bool] = lambda index: True) -> Switches:
    """A sliding window in the layers that `layer_types` names, or else those that `is_local` says."""
    num_layers, types = keys["num_hidden_layers"], keys.get("layer_types")
    if types is not None:
        if len(types) != num_layers or not {*types} <= {"sliding_attention", "full_attention"}:
            raise ValueError(f"layer_types must be sliding_attention or full_attention in {num_layers} layers: {types}")
        local = tuple(kind == "sliding_attention" for kind in types)
    else:
        local = tuple(map(is_local, range(num_layers)))
    if "sliding_window" not in keys:
        local = ()
    return {"window": keys["sliding_window"], "local_layers": local} if any(local) else {}


def _llama(keys: Keys) -> Switches:
    if "sliding_window" in keys:
        raise ValueError(f"sliding_window = {keys['sliding_window']!r} is not supported; known: None")
    return {}


def _qwen(keys: Keys) -> Switches:
    """A window counts only where it is switched on, and there from a layer on."""
    first = keys.get("max_window_layers", 0)
    return _window(keys, lambda index: index >= first) if keys.get("use_sliding_window") else {}


def _qwen2(keys: Keys) -> Switches:
    return {"qkv_bias": True, **_qwen(keys)}


def _qwen3(keys: Keys) -> Switches:
    return {"qk_norm": True, **_qwen(keys)}


def _baichuan(keys: Keys) -> Switches:
    """The 13B models state no `max_position_embeddings`, and have ALiBi. Baichuan 2 normalises the rows of its head."""
    second = {"norm_head": keys["vocab_size"] == 125696 or "z_loss_weight" in keys}
    return (
        second
        if keys["max_position_embeddings"]
        else second | {"alibi": True, "max_position": keys["model_max_length"]}
    )


def _gemma(keys: Keys) -> Switches:
    return {
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": math.sqrt(keys["hidden_size"]),
        "attention_scale": keys["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": keys.get("attn_logit_softcapping"),
        "logit_softcap": keys.get("final_logit_softcapping"),
    }


def _gemma2(keys: Keys) -> Switches:
    return _gemma(keys) | _window(keys, lambda index: index % 2 == 0)


def _gemma3(keys: Keys) -> Switches:
    pattern = keys["sliding_window_pattern"]
    rope = keys.get("rope_parameters") or {}
    if "full_attention" in rope:
        full, local = rope["full_attention"], rope.get("sliding_attention", {})
        if (kind := local.get("rope_type", "default")) != "default":
            raise ValueError(f"RoPE type {kind!r} of sliding_attention is not supported; known: default")
        local_theta = local.get("rope_theta", keys["rope_local_base_freq"])
    else:
        full, local_theta = rope or keys.get("rope_scaling") or {}, keys["rope_local_base_freq"]
    scaled = _rope(keys, full) | {
        "max_position": keys["max_position_embeddings"]
    }  # the stated length is the scaled one
    window = _window(keys, lambda index: bool((index + 1) % pattern))
    return _gemma(keys) | {"qk_norm": True, "local_rope_theta": local_theta} | scaled | window


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_BAICHUAN = Family("baichuan", {"max_position_embeddings": 0, "model_max_length": 4096}, _baichuan)
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", switches=_llama),  # also SmolLM2
    "MistralForCausalLM": Family(
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        _window,
    ),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, _qwen2),  # also Qwen2.5
    "Qwen3ForCausalLM": Family("qwen3", _QWEN | {"head_dim": 128}, _qwen3),
    "Phi3ForCausalLM": Family("phi3", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, _window),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"sliding_window_pattern": 6},
        _gemma3,
    ),
    "BaiChuanForCausalLM": _BAICHUAN,  # the first 7B
    "BaichuanForCausalLM": _BAICHUAN,
}
