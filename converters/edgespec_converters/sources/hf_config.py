"""config.json of a Hugging Face folder → `DecoderConfig`. Defaults are those of the `transformers` configuration classes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from edgespec.core.decoder import FAMILIES, DecoderConfig, Family, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec_converters.sources.settings import Settings

_MODEL_TYPES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "gemma3": "gemma3"}
_ACTIVATIONS: dict[Family, tuple[str, str]] = {
    "llama": ("hidden_act", "silu"),
    "qwen2": ("hidden_act", "silu"),
    "qwen3": ("hidden_act", "silu"),
    "gemma3": ("hidden_activation", "gelu_pytorch_tanh"),
}
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_theta": 10000.0},
    "qwen2": {"tie_word_embeddings": False, "rope_theta": 10000.0},
    "qwen3": {"tie_word_embeddings": False, "rope_theta": 10000.0, "head_dim": 128},
    "gemma3": {
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "head_dim": 256,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
    },
}
# What would change the arithmetic, and the values that leave it alone.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "compression_config": (None,),
    "quantization": (None,),
}
_CODE_KEYS = ("auto_map", "model_file", "custom_pipelines", "trust_remote_code")
_PYTHON_FILE = re.compile(r"\.py[co]?\b")


def refuse_code(values: Any, where: str) -> None:
    """Raise ArtifactError for settings that ask a loader to import Python; edgespec never does, and says so instead of guessing."""
    if isinstance(values, dict):
        for key, value in cast(dict[str, Any], values).items():
            if key in _CODE_KEYS and value:
                raise ArtifactError(
                    f"{where} asks to run code of its own ({key} = {str(value)[:80]}); edgespec never runs code from a model"
                )
            refuse_code(value, where)
    elif isinstance(values, list):
        for value in cast(list[Any], values):
            refuse_code(value, where)
    elif isinstance(values, str) and _PYTHON_FILE.search(values):
        raise ArtifactError(f"{where} names a Python file ({values[:80]!r}); edgespec never runs code from a model")


def hf_config(values: Mapping[str, Any], where: str, tensors: Collection[str]) -> DecoderConfig:
    """`tensors`: the names in the folder; they decide where config.json does not say whether the head is tied."""
    family = _family(values, where)
    own = dict(values)
    if isinstance(text := own.pop("text_config", None), dict):
        own |= {k: v for k, v in cast(dict[str, Any], text).items() if v is not None}
    s = Settings({k: v for k, v in own.items() if v is not None}, where)
    for key, allowed in _MUST_BE.items():
        if s.get(key) not in allowed:
            raise s.refuse(key, f"edgespec knows {family} models without it")
    kinds = s.get("layer_types") or ["full_attention"]
    if family != "gemma3" and (not isinstance(kinds, list) or set(map(str, cast(list[Any], kinds))) - {"full_attention"}):
        raise s.refuse("layer_types", f"every layer of a {family} model attends to the whole context here")
    key, activation = _ACTIVATIONS[family]
    if s.text(key, activation) != activation:
        raise s.refuse(key, f"{family} models use {activation}")
    defaults = _DEFAULTS[family]
    hidden = s.integer("hidden_size")
    heads = s.integer("num_attention_heads", defaults.get("num_attention_heads"))
    tied = s.flag("tie_word_embeddings", defaults["tie_word_embeddings"] or "lm_head.weight" not in tensors)
    theta, local_theta, scaling = _rope(s, family)
    max_context = s.integer("max_position_embeddings", defaults.get("max_position_embeddings"))
    if scaling is not None and scaling.kind == "yarn":
        max_context = max(max_context, round(scaling.original_context * scaling.factor))
    head_dim = s.integer("head_dim", defaults.get("head_dim", hidden // max(heads, 1)))
    layers = s.layers("num_hidden_layers", len(tensors))
    return DecoderConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=s.integer("num_key_value_heads", defaults.get("num_key_value_heads", heads)),
        head_dim=head_dim,
        ffn=s.integer("intermediate_size"),
        vocab_rows=s.integer("vocab_size", defaults.get("vocab_size")),
        max_context=max_context,
        norm_eps=s.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=tied,
        attention_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        **(_gemma3(s, hidden, layers, local_theta) if family == "gemma3" else {}),
    )


def _family(values: Mapping[str, Any], where: str) -> Family:
    found = str(values.get("model_type"))
    if found not in _MODEL_TYPES:
        raise ArtifactError(f"{where}: model_type {found[:80]!r} is not supported; supported: {', '.join(FAMILIES)}")
    return _MODEL_TYPES[found]


def _gemma3(s: Settings, hidden: int, layers: int, local_theta: float) -> dict[str, Any]:
    defaults = _DEFAULTS["gemma3"]
    sliding = _sliding(s, layers)
    return {
        "post_norms": True,
        "norm_offset": 1.0,
        "embed_scale": math.sqrt(max(hidden, 0)),  # what is not positive is refused with the other sizes
        "attention_scale": 1 / math.sqrt(s.positive("query_pre_attn_scalar", defaults["query_pre_attn_scalar"])),
        "activation": "gelu_tanh",
        "sliding_window": s.integer("sliding_window", defaults["sliding_window"]),
        "sliding": sliding,
        "rope_local_theta": local_theta,
    }


def _sliding(s: Settings, layers: int) -> tuple[bool, ...]:
    kinds = s.get("layer_types")
    if kinds is None:
        period = s.integer("sliding_window_pattern", _DEFAULTS["gemma3"]["sliding_window_pattern"])
        if period < 1:
            raise s.wrong("sliding_window_pattern", "at least 1")
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if not isinstance(kinds, list) or any(k not in ("sliding_attention", "full_attention") for k in cast(list[Any], kinds)):
        raise s.wrong("layer_types", "a list of sliding_attention and full_attention")
    return tuple(k == "sliding_attention" for k in cast(list[str], kinds))


def _rope(s: Settings, family: Family) -> tuple[float, float, RopeScaling | None]:
    """Global theta, local theta, scaling. Newer folders keep all in rope_parameters, gemma's by kind of layer."""
    defaults = _DEFAULTS[family]
    theta = s.number("rope_theta", defaults["rope_theta"])
    local = s.number("rope_local_base_freq", defaults.get("rope_local_base_freq", 0.0))
    rope = s.section("rope_parameters") or s.section("rope_scaling")
    if rope is None:
        return theta, local, None
    if sliding := rope.section("sliding_attention"):
        local = sliding.number("rope_theta", local)
        if (kind := sliding.text("rope_type", "default")) != "default":
            raise sliding.refuse("rope_type", f"local layers are never scaled, found {kind}")
    rope = rope.section("full_attention") or rope
    return rope.number("rope_theta", theta), local, _scaling(rope, s)


def _scaling(rope: Settings, s: Settings) -> RopeScaling | None:
    kind_key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_key, "default")
    for key in ("mscale", "mscale_all_dim", "short_factor", "long_factor", "mrope_section"):
        if rope.get(key) is not None:
            raise rope.refuse(key, "supported rope scalings: linear, llama3, yarn")
    if rope.get("truncate") is False:
        raise rope.refuse("truncate", "yarn's bounds are rounded to whole dimensions here")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "every dimension is rotated here")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    original = rope.integer("original_max_position_embeddings", s.integer("max_position_embeddings"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=rope.number("factor"),
            original_context=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=None if rope.get("attention_factor") is None else rope.number("attention_factor"),
        )
    raise rope.refuse(kind_key, "supported rope scalings: linear, llama3, yarn")
