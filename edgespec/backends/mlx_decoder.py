"""The decoder graph in MLX, built from a DecoderConfig and a folder of safetensors in mlx-lm's layout.

Nothing here evaluates: functions build graphs on the current stream, the engine runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.core.decoder import DecoderConfig
from edgespec.core.draft import ancestor_mask, depths, is_chain
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError

Attend = Callable[[mx.array, mx.array, mx.array], mx.array]  # q [1, H, n, D], new k and v [1, KV, n, D] -> [1, H, n, D]

_WORD_BITS = 32  # codes are packed into uint32


@dataclass(frozen=True, slots=True)
class Matrix:
    """`weight` [N, K] float, or uint32 codes with `scales` and `biases` [N, K / group]; `bias` [N] is added to products."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group: int = 0
    bits: int = 0
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """[…, K] -> […, N]."""
        if self.scales is None:
            out = x @ self.weight.T
        else:
            out = mx.quantized_matmul(x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group, bits=self.bits)
        return out if self.bias is None else out + self.bias

    def rows(self, ids: mx.array) -> mx.array:
        """[n] -> [n, K]."""
        if self.scales is None or self.biases is None:
            return self.weight[ids]
        return mx.dequantize(self.weight[ids], self.scales[ids], self.biases[ids], group_size=self.group, bits=self.bits)

    def first(self, n: int) -> Matrix:
        """The first `n` rows, in place."""
        if self.scales is None or self.biases is None:
            return Matrix(self.weight[:n], bias=self.bias)
        return Matrix(self.weight[:n], self.scales[:n], self.biases[:n], self.group, self.bits, self.bias)


class Decoder:
    """Weights and layers. `dtype` is what activations and the cache are computed in; all floats are cast to it once."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, mx.array], *, vocab_size: int, dtype: mx.Dtype) -> None:
        """ArtifactError for missing, misshapen or unsupported tensors. Padding rows behind `vocab_size` are never computed."""
        self.config, self.dtype = config, dtype
        self._shapes = config.shapes()
        self._embedding = self._matrix(tensors, "model.embed_tokens").first(vocab_size)
        self._head = self._embedding if config.tied else self._matrix(tensors, "lm_head").first(vocab_size)
        self._norm = self._vector(tensors, "model.norm.weight", config.norm_offset)
        self._layers = [self._layer(tensors, i) for i in range(config.layers)]

    def arrays(self) -> list[mx.array]:
        """Every weight array, for evaluation."""
        matrices = [self._embedding, self._head, *(m for layer in self._layers for m in layer.matrices.values())]
        vectors = [self._norm, *(v for layer in self._layers for v in layer.norms.values())]
        parts = [part for m in matrices for part in (m.weight, m.scales, m.biases, m.bias) if part is not None]
        return parts + vectors

    def embed(self, token_ids: mx.array) -> mx.array:
        """int32 [n] -> [1, n, hidden]."""
        rows = self._embedding.rows(token_ids)[None]
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    def layer(self, index: int, x: mx.array, positions: Positions, attend: Attend) -> mx.array:
        """One layer: [1, n, hidden] in and out."""
        c, layer = self.config, self._layers[index]
        normed = layer.normed
        q, k, v = (self._heads(layer.matrices[name](normed("input_layernorm", x))) for name in ("q_proj", "k_proj", "v_proj"))
        if c.qk_norm:
            q, k = normed("q_norm", q), normed("k_norm", k)
        seen = attend(positions.rotate(q, layer.wavelengths), positions.rotate(k, layer.wavelengths), v)
        attention_out = layer.matrices["o_proj"](seen.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))
        if c.post_norms:
            x = x + normed("post_attention_layernorm", attention_out)
            mlp_in = normed("pre_feedforward_layernorm", x)
        else:
            x = x + attention_out
            mlp_in = normed("post_attention_layernorm", x)
        gate = self._activate(layer.matrices["gate_proj"](mlp_in))
        mlp_out = layer.matrices["down_proj"](gate * layer.matrices["up_proj"](mlp_in))
        return x + (normed("post_feedforward_layernorm", mlp_out) if c.post_norms else mlp_out)

    def attention(self, index: int) -> tuple[float, int | None]:
        """What q·k is multiplied by in a layer, and its window."""
        return self._layers[index].scale, self.config.window(index)

    def logits(self, x: mx.array) -> mx.array:
        """[n, hidden] before the final norm -> float32 [n, vocab]."""
        return self._head(mx.fast.rms_norm(x, self._norm, self.config.norm_eps)).astype(mx.float32)

    def _heads(self, x: mx.array) -> mx.array:
        """[1, n, heads * D] -> [1, heads, n, D]."""
        return x.reshape(1, x.shape[1], -1, self.config.head_dim).transpose(0, 2, 1, 3)

    def _activate(self, x: mx.array) -> mx.array:
        if self.config.activation == "silu":
            return x * mx.sigmoid(x)
        return 0.5 * x * (1 + mx.tanh(float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x * x * x)))

    def _layer(self, tensors: Mapping[str, mx.array], index: int) -> _Layer:
        c, prefix = self.config, f"model.layers.{index}."
        matrices = {
            name.rsplit(".", 1)[-1]: self._matrix(tensors, prefix + name)
            for name in (
                *(f"self_attn.{p}_proj" for p in "qkvo"),
                *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            )
        }
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["self_attn.q_norm", "self_attn.k_norm"] if c.qk_norm else []
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if c.post_norms else []
        norms = {name.rsplit(".", 1)[-1]: self._vector(tensors, f"{prefix}{name}.weight", c.norm_offset) for name in names}
        frequencies, factor = c.rope(index)
        # Rope's factor on cos and sin (yarn) enters q and k alike, so it can act on their product, squared.
        return _Layer(matrices, norms, mx.array((1 / frequencies).astype(np.float32)), c.scale * factor**2, c.norm_eps)

    def _matrix(self, tensors: Mapping[str, mx.array], name: str) -> Matrix:
        rows, columns = self._shapes[f"{name}.weight"]
        weight = _get(tensors, f"{name}.weight")
        bias = self._vector(tensors, f"{name}.bias") if f"{name}.bias" in self._shapes else None
        if f"{name}.scales" not in tensors:
            _check_shape(name, weight, (rows, columns))
            return Matrix(weight.astype(self.dtype), bias=bias)
        if f"{name}.biases" not in tensors or weight.dtype != mx.uint32:
            raise ArtifactError(f"{name} is not quantised with scales and biases; only affine formats are supported; convert again")
        scales, biases = tensors[f"{name}.scales"], tensors[f"{name}.biases"]
        # Group and width follow from the shapes, layer by layer, whatever config.json says of them.
        group, bits = columns // max(scales.shape[-1], 1), weight.shape[-1] * _WORD_BITS // columns
        _check_shape(name, weight, (rows, columns * bits // _WORD_BITS))
        _check_shape(f"{name}.scales", scales, (rows, columns // max(group, 1)))
        _check_shape(f"{name}.biases", biases, scales.shape)
        return Matrix(weight, scales.astype(self.dtype), biases.astype(self.dtype), group, bits, bias)

    def _vector(self, tensors: Mapping[str, mx.array], name: str, offset: float = 0.0) -> mx.array:
        vector = _get(tensors, name)
        _check_shape(name, vector, self._shapes[name])
        return (vector.astype(mx.float32) + offset).astype(self.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    """`wavelengths` float32 [D / 2]: positions per radian, which MLX's rope calls `freqs`. `scale` multiplies q·k."""

    matrices: Mapping[str, Matrix]
    norms: Mapping[str, mx.array]
    wavelengths: mx.array
    scale: float
    norm_eps: float

    def normed(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.norms[name], self.norm_eps)


class Positions:
    """Where the rows of a batch stand behind `length` committed tokens: their rotation, and what each may see.

    A chain's rows stand in a line; a tree's row i stands at `length + depth`, beside its siblings.
    """

    def __init__(self, batch: TokenBatch, length: int) -> None:
        self.length, self.n = length, len(batch)
        self._chain = is_chain(batch.parents)
        self._depths = depths(batch.parents)  # [n]
        self._ancestors = None if self._chain else ancestor_mask(batch.parents)  # [n, n]
        self._offsets = None if self._chain else mx.array(self._depths + np.int32(length))
        self._visible: dict[int | None, tuple[int, mx.array | str | None]] = {}

    def rotate(self, x: mx.array, wavelengths: mx.array) -> mx.array:
        """Rotary embedding of x [1, heads, n, D], halves turning together."""
        if self._offsets is None:
            return _rope(x, self.length, wavelengths)
        # One offset per batch entry is what the kernel knows, so the rows go there.
        return _rope(x.transpose(2, 1, 0, 3), self._offsets, wavelengths).transpose(2, 1, 0, 3)

    def visible(self, window: int | None) -> tuple[int, mx.array | str | None]:
        """The first cached row that any row sees, and the mask over the rows from there on: bool [n, rows], "causal" or None."""
        if window not in self._visible:
            self._visible[window] = self._see(window)
        return self._visible[window]

    def _see(self, window: int | None) -> tuple[int, mx.array | str | None]:
        first = 0 if window is None else max(0, self.length + 1 - window)
        bound = window is not None and self.length + int(self._depths.max()) + 1 > window
        if self._chain and self.n == 1:
            return first, None  # its window is exactly the slice
        if self._chain and not bound:
            return first, "causal"
        committed = self.length - first
        ancestors = mx.tri(self.n, self.n, dtype=mx.bool_) if self._ancestors is None else mx.array(self._ancestors.tolist())
        mask = mx.concatenate([mx.ones((self.n, committed), dtype=mx.bool_), ancestors], axis=1)
        if window is None or not bound:
            return first, mask
        depth = mx.array(self._depths)
        columns = mx.concatenate([mx.arange(first - self.length, 0, dtype=mx.int32), depth])  # positions relative to `length`
        return first, mask & (columns[None, :] > depth[:, None] - window)


def _rope(x: mx.array, offset: int | mx.array, wavelengths: mx.array) -> mx.array:
    return mx.fast.rope(x, 2 * wavelengths.size, traditional=False, base=None, scale=1.0, offset=offset, freqs=wavelengths)


def _get(tensors: Mapping[str, mx.array], name: str) -> mx.array:
    if name not in tensors:
        raise ArtifactError(f"the weights lack {name}; convert the model again")
    return tensors[name]


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ArtifactError(f"{name} should have shape {shape}, found {tuple(array.shape)}; convert the model again")
