"""GGUF metadata → `DecoderConfig`. Keys and their defaults are those that llama.cpp writes and assumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.core.decoder import FAMILIES, DecoderConfig, Family, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec.core.scores import Float32
from edgespec_converters.sources.settings import Settings

_GEMMA3_PATTERN = 6  # five local layers, then one global
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim)

_UNDERSTOOD = {
    "": "block_count context_length embedding_length feed_forward_length vocab_size tensor_data_layout",
    "attention.": "head_count head_count_kv key_length value_length layer_norm_rms_epsilon sliding_window sliding_window_pattern causal",
    "rope.": "freq_base freq_base_swa dimension_count scale_linear",
    "rope.scaling.": "type factor original_context_length attn_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow finetuned",
}


def gguf_family(fields: Mapping[str, Any], where: str) -> Family:
    """The architecture. Raises ArtifactError for one that is not supported, and for files that hold only part of a model."""
    general = Settings(fields, where)
    if general.integer("split.count", 1) > 1:
        raise general.refuse("split.count", "the model is split over several files; merge them into one first")
    if (kind := general.text("general.type", "model")) != "model":
        raise general.refuse("general.type", f"{kind} files hold no whole model")
    found = general.text("general.architecture")
    for family in FAMILIES:
        if found == family:
            return family
    raise ArtifactError(f"{where}: architecture {found!r} is not supported; supported: {', '.join(FAMILIES)}")


def gguf_config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str, rope_factors: Float32 | None
) -> DecoderConfig:
    """`shapes` by GGUF tensor name; `rope_factors` float32 [head_dim / 2] is "rope_freqs.weight", what each frequency is divided by."""
    family = gguf_family(fields, where)
    s = Settings(fields, where, prefix=f"{family}.")
    _refuse_unknown(s)
    if "token_embd.weight" not in shapes:
        raise ArtifactError(f"{where} has no tensor 'token_embd.weight'; it holds no whole model")
    hidden, heads = s.integer("embedding_length"), s.integer("attention.head_count")
    head_dim = s.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if s.integer(key, head_dim) != head_dim:
            raise s.refuse(key, f"it differs from the {head_dim} of attention.key_length")
    scaling = _rope_scaling(s)
    config = DecoderConfig(
        family=family,
        layers=s.layers("block_count", len(shapes)),
        hidden=hidden,
        heads=heads,
        kv_heads=s.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=s.integer("feed_forward_length"),
        vocab_rows=shapes["token_embd.weight"][0],
        max_context=_max_context(s, scaling),
        norm_eps=_number(s, "attention.layer_norm_rms_epsilon"),
        rope_theta=_number(s, "rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tied="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        qk_norm=family in ("qwen3", "gemma3"),
    )
    if rope_factors is not None:
        config = _with_rope_factors(config, rope_factors, where)
    return _gemma3(config, s) if family == "gemma3" else _all_global(config, s)


def _refuse_unknown(s: Settings) -> None:
    """A hyperparameter that nobody here knows could change the arithmetic. Values that switch a feature off are fine."""
    known = {group + name for group, names in _UNDERSTOOD.items() for name in names.split()}
    for key, value in s.values.items():
        name = key.removeprefix(s.prefix)
        if key.startswith(s.prefix) and name not in known and value not in (0, False, "none"):
            raise s.refuse(name, f"no part of the {s.prefix[:-1]} models that edgespec knows")
    if not s.flag("attention.causal", True):
        raise s.refuse("attention.causal", "only decoders can generate")


def _all_global(config: DecoderConfig, s: Settings) -> DecoderConfig:
    if s.get("attention.sliding_window"):
        raise s.refuse("attention.sliding_window", f"sliding windows are supported for gemma3, not for {config.family}")
    return config


def _gemma3(config: DecoderConfig, s: Settings) -> DecoderConfig:
    window = s.integer("attention.sliding_window", 0)
    scale_dim = config.hidden / config.heads if config.layers == _GEMMA3_27B_LAYERS else config.head_dim
    return replace(
        config,
        post_norms=True,
        norm_offset=1.0,
        embed_scale=math.sqrt(config.hidden),
        attention_scale=1 / math.sqrt(scale_dim),
        activation="gelu_tanh",
        sliding_window=window,
        sliding=_pattern(s, config.layers) if window else (),
        rope_local_theta=_number(s, "rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
    )


def _pattern(s: Settings, layers: int) -> tuple[bool, ...]:
    """One flag per layer. The key holds either the flags or the period, whose last layer is global."""
    value = s.get("attention.sliding_window_pattern")
    if isinstance(value, list):
        return tuple(bool(flag) for flag in value)
    period = s.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if period < 1:
        raise s.wrong("attention.sliding_window_pattern", "at least 1")
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def _rope_scaling(s: Settings) -> RopeScaling | None:
    kind = s.text("rope.scaling.type", "linear" if s.get("rope.scale_linear") else "none")
    factor = _number(s, "rope.scaling.factor", _number(s, "rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise s.refuse("rope.scaling.type", "supported: none, linear, yarn, and llama3 as tensor rope_freqs.weight")
    extra = _number(s, "rope.scaling.yarn_attn_factor", _number(s, "rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=s.integer("rope.scaling.original_context_length", s.integer("context_length")),
        beta_fast=_number(s, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(s, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * (1 + 0.1 * math.log(max(factor, 1.0))),
    )


def _max_context(s: Settings, scaling: RopeScaling | None) -> int:
    length = s.integer("context_length")
    if scaling is None or scaling.kind != "yarn":
        return length
    return max(length, round(scaling.original_context * scaling.factor))


def _with_rope_factors(config: DecoderConfig, factors: Float32, where: str) -> DecoderConfig:
    """Recover Llama 3's scaling, of which the file keeps only the result. Raises ArtifactError unless it is reproduced to 1e-4."""
    if factors.shape != (config.head_dim // 2,) or not np.all(factors > 0):
        raise ArtifactError(f"{where}: rope_freqs.weight must be {config.head_dim // 2} positive numbers, found shape {factors.shape}")
    if config.rope_scaling is not None:
        raise ArtifactError(f"{where} scales rotary frequencies twice: by {config.rope_scaling.kind} and by rope_freqs.weight")
    if np.all(factors == 1):
        return config
    plain = config.rope(0)[0]
    for scaling in _llama3_candidates(factors.astype(np.float64), plain):
        scaled = replace(config, rope_scaling=scaling)
        if np.allclose(plain / scaled.rope(0)[0], factors, rtol=1e-4, atol=0):
            return scaled
    raise ArtifactError(f"{where}: the rotary frequencies in rope_freqs.weight follow no supported rule (llama3)")


def _llama3_candidates(factors: np.ndarray, plain: np.ndarray) -> list[RopeScaling]:
    """The published parameters first, then a fit.

    Between its bands the rule is linear in 1/wavelength: 1/f = (1 - s)/factor + s with s = (original/wavelength - low)/(high - low).
    Only the ratios original : low : high matter, so low = 1 is no loss.
    """
    factor = float(np.round(factors.max(), 4))
    out = [RopeScaling(kind="llama3", factor=factor, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)]
    between = (factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4))
    if between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(plain[between] / (2 * np.pi), smooth, 1)
        if slope > 0 and intercept < 0:
            original = round(-slope / intercept)
            out.append(RopeScaling(kind="llama3", factor=factor, original_context=original, high_freq_factor=float(1 - 1 / intercept)))
    return out


def _number(s: Settings, key: str, default: float | None = None) -> float:
    """The shortest decimal that rounds to the file's float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(s.number(key, default))))
