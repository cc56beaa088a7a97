"""The one description of a decoder architecture that every backend and every converter builds from.

Tensors go by their Hugging Face names ("model.layers.3.self_attn.q_proj.weight", …), with Hugging Face's row order for rotary
embeddings (halves, not pairs) and Hugging Face's stored norm weights: the effective weight is `stored + norm_offset`.
A tied model carries no "lm_head.weight".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

import numpy as np

from edgespec.core.errors import ArtifactError
from edgespec.core.scores import Float64

Family = Literal["llama", "qwen2", "qwen3", "gemma3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    linear: all by 1/factor. llama3: by wavelength bands (Llama 3.1 model card). yarn: by ramps, with `attention_factor` on
    cos and sin (Peng et al. 2023, sections 3.2 and 3.4).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor) or self.factor <= 0:
            raise ArtifactError(f"rope scaling factor must be a positive number, got {self.factor}")
        if self.kind != "linear" and self.original_context <= 0:
            raise ArtifactError(f"rope scaling {self.kind!r} needs the original context length, got {self.original_context}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes in elements, contexts in tokens. `vocab_rows` counts embedding rows, padding included.

    `sliding`: one flag per layer; a sliding layer sees the last `sliding_window` tokens, itself included, and uses
    `rope_local_theta` without scaling. `embed_scale` multiplies embeddings; `attention_scale` multiplies q·k.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_rows: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    attention_bias: bool = False  # bias on q, k, v (qwen2)
    qk_norm: bool = False  # RMS norm per head on q and k before rotation (qwen3, gemma3)
    post_norms: bool = False  # norms on the outputs of attention and MLP as well (gemma3)
    norm_offset: float = 0.0  # gemma stores weight - 1
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sliding_window: int = 0
    sliding: tuple[bool, ...] = ()
    rope_local_theta: float = 0.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ArtifactError(f"architecture {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab_rows", "max_context"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 1 << 31:
                raise ArtifactError(f"decoder config: {name} must be a positive integer, got {value!r}")
        if self.heads % self.kv_heads:
            raise ArtifactError(f"decoder config: {self.heads} heads cannot share {self.kv_heads} kv heads evenly")
        if self.head_dim % 2:
            raise ArtifactError(f"decoder config: head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not self.norm_eps > 0 or not self.rope_theta > 0:
            raise ArtifactError(f"decoder config: norm_eps and rope_theta must be positive, got {self.norm_eps} and {self.rope_theta}")
        if self.sliding and len(self.sliding) != self.layers:
            raise ArtifactError(f"decoder config: {len(self.sliding)} sliding flags for {self.layers} layers")
        if any(self.sliding) and (self.sliding_window <= 0 or self.rope_local_theta <= 0):
            raise ArtifactError("decoder config: sliding layers need sliding_window and rope_local_theta")

    def window(self, layer: int) -> int | None:
        """Tokens that layer `layer` sees, itself included; None: all."""
        return self.sliding_window if self.sliding and self.sliding[layer] else None

    @property
    def scale(self) -> float:
        """What q·k is multiplied by."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    def rope(self, layer: int) -> tuple[Float64, float]:
        """Inverse frequencies float64 [head_dim / 2] of a layer, and the factor on its cos and sin."""
        local = self.window(layer) is not None
        theta = self.rope_local_theta if local else self.rope_theta
        inverse = theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        if local or self.rope_scaling is None:
            return inverse, 1.0
        return _scaled(inverse, theta, self.head_dim, self.rope_scaling)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model must have, by name."""
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_rows, d), "model.norm.weight": (d,)}
        if not self.tied:
            out["lm_head.weight"] = (self.vocab_rows, d)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            out |= {
                p + "self_attn.q_proj.weight": (q, d),
                p + "self_attn.k_proj.weight": (kv, d),
                p + "self_attn.v_proj.weight": (kv, d),
                p + "self_attn.o_proj.weight": (d, q),
                p + "mlp.gate_proj.weight": (self.ffn, d),
                p + "mlp.up_proj.weight": (self.ffn, d),
                p + "mlp.down_proj.weight": (d, self.ffn),
                p + "input_layernorm.weight": (d,),
                p + "post_attention_layernorm.weight": (d,),
            }
            if self.attention_bias:
                out |= {p + "self_attn.q_proj.bias": (q,), p + "self_attn.k_proj.bias": (kv,), p + "self_attn.v_proj.bias": (kv,)}
            if self.qk_norm:
                out |= {p + "self_attn.q_norm.weight": (self.head_dim,), p + "self_attn.k_norm.weight": (self.head_dim,)}
            if self.post_norms:  # as in gemma3: post_attention_layernorm then acts on the attention's output
                out |= {p + "pre_feedforward_layernorm.weight": (d,), p + "post_feedforward_layernorm.weight": (d,)}
        return out

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises ArtifactError for unknown or missing fields."""
        known = {f.name for f in fields(cls)}
        if unknown := set(data) - known:
            raise ArtifactError(f"decoder config has unknown fields {sorted(unknown)}; was it written by a newer edgespec?")
        values = dict(data)
        try:
            if values.get("rope_scaling") is not None:
                values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
            values["sliding"] = tuple(bool(s) for s in values.get("sliding", ()))
            return cls(**values)
        except TypeError as error:
            raise ArtifactError(f"decoder config is incomplete: {error}") from error


def _scaled(inverse: Float64, theta: float, head_dim: int, s: RopeScaling) -> tuple[Float64, float]:
    if s.kind == "linear":
        return inverse / s.factor, 1.0
    if s.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = s.original_context / s.low_freq_factor, s.original_context / s.high_freq_factor
        smooth = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - smooth) * inverse / s.factor + smooth * inverse
        return np.where(wavelength > low, inverse / s.factor, np.where(wavelength < high, inverse, between)), 1.0

    def dimension(rotations: float) -> float:
        return head_dim * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low_dim = max(math.floor(dimension(s.beta_fast)), 0)
    high_dim = min(math.ceil(dimension(s.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low_dim) / max(high_dim - low_dim, 0.001), 0, 1)
    factor = s.attention_factor if s.attention_factor is not None else (0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0)
    return inverse / s.factor * ramp + inverse * (1 - ramp), factor
