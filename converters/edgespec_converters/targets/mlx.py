"""Checkpoint + recipe → a folder that MLX reads, ours and mlx-lm alike.

config.json          Hugging Face's keys, and "quantization": {"group_size", "bits", "<layer>": {…} or false where it differs}
model.safetensors    matrices as `<layer>.weight` (uint32, codes packed lowest bits first), `.scales` and `.biases`, with
                     weight = scale * code + bias; norms as Hugging Face stores them; no head when it is tied

A recipe of 32-bit floats keeps everything float32. Otherwise scales, biases and vectors are 16-bit floats, since mlx-lm computes in
the widest type it finds and 32 bits cost a GPU half its speed: bfloat16 for a bfloat16 checkpoint and for gemma3, whose activations
overflow float16; float16 for all others (eight times finer, and GGUF's own block scales stay exact in it). Tensors asked for in 16
bits keep the 16-bit type they have. What a 16-bit float cannot hold stays float32 and is listed in `Artifact.exceptions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.core.decoder import DecoderConfig, Family
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Artifact, FileRecord
from edgespec_converters.checkpoint import Checkpoint
from edgespec_converters.quantize import Quantized, UInt8, quantize_tensor
from edgespec_converters.recipes import Recipe, fit
from edgespec_converters.safetensors_file import ShardedWriter

ENGINE = "mlx"
GROUPS = (32, 64, 128)  # what MLX's affine kernels take
SHARD_BYTES = 4 << 30

FloatKind = Literal["F16", "BF16", "F32"]
_NUMPY: dict[FloatKind, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
_TORCH: dict[FloatKind, str] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_CLASSES: dict[Family, tuple[str, str]] = {  # model_type, architecture
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_EMBEDDING = "model.embed_tokens.weight"

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)


def write(
    checkpoint: Checkpoint,
    recipe: Recipe,
    folder: Path,
    *,
    vocab_size: int,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Artifact:
    """Write config and weights into `folder` (created) and describe them; parity is left to the caller.

    Padding rows behind the first `vocab_size` stay in the file, as in the original. Memory: the largest tensor in float32 and its
    packed copy. ArtifactError for weights that are not finite and for fewer embedding rows than `vocab_size`.
    """
    shapes = checkpoint.config.shapes()
    if shapes[_EMBEDDING][0] < vocab_size:
        raise ArtifactError(f"{checkpoint.name} has {shapes[_EMBEDDING][0]} embedding rows for {vocab_size} tokens; the source is damaged")
    folder.mkdir(parents=True, exist_ok=True)
    names = [part for name in shapes for part in (name, *_scale_names(name))]
    with ShardedWriter(folder, names, shard_bytes=shard_bytes) as writer:
        tensors = _Tensors(checkpoint, recipe, writer)
        for done, (name, shape) in enumerate(shapes.items()):
            tensors.put(name, shape)
            if progress is not None:
                progress(done + 1, len(shapes))
    _write_json(folder / "config.json", _config(checkpoint, tensors.half, _quantization(recipe, tensors.settings)))
    unread = 0 if checkpoint.config.tied else tensors.nbytes[_EMBEDDING]  # of an embedding that is no head a pass reads some rows
    return Artifact(
        engine=ENGINE,
        recipe=recipe.name,
        folder=folder.name,
        files={f"{folder.name}/{path.name}": _record(path) for path in sorted(folder.iterdir())},
        weight_bytes=sum(tensors.nbytes.values()) - unread,
        bits_per_weight=8 * sum(writer.nbytes.values()) / sum(int(np.prod(shape)) for shape in shapes.values()),
        exceptions=tensors.exceptions,
    )


def pack(codes: UInt8, bits: int) -> NDArray[np.uint32]:
    """uint8 [N, K], one code a byte → uint32 [N, K bits / 32], the first code in the lowest bits."""
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(codes).view("<u4")


class _Tensors:
    """Puts one tensor after the other into the file and keeps the books on them."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, writer: ShardedWriter) -> None:
        self._checkpoint, self._recipe, self._writer = checkpoint, recipe, writer
        self.half: FloatKind = _float_kind(checkpoint, recipe)
        self.settings: dict[str, dict[str, int] | None] = {}  # per layer; None: a matrix left unquantised
        self.exceptions: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}

    def put(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            self._put_float(name, self.half)
            return
        asked = self._recipe.format_for(name, shape)
        format, why = fit(asked, shape[1], blocks=GROUPS)
        if format.quantized:
            quantized = quantize_tensor(self._checkpoint, name, format)
            if quantized.block != format.block:
                why = f"int{quantized.bits} block {quantized.block} (the source's own blocks)"
            self._put_quantized(name, quantized)
        else:
            self._put_float(name, self._sixteen(name) if format.bits == 16 else "F32")
        if why:
            self.exceptions[name] = why

    def _put_quantized(self, name: str, quantized: Quantized) -> None:
        layer, (scales_name, biases_name) = name.removesuffix(".weight"), _scale_names(name)
        with np.errstate(over="ignore"):  # looked for below
            scales = quantized.scales.astype(_NUMPY[self.half])
            # From the scale as stored, so that a code at the zero point still means 0 as nearly as the type allows.
            exact = Quantized(quantized.codes, scales.astype(np.float32), quantized.zeros, quantized.bits).biases()
            biases = exact.astype(_NUMPY[self.half])
        if not np.isfinite(biases).all() or not np.isfinite(scales).all():
            self.exceptions[name] = f"float32 scales (they overflow {_TORCH[self.half]})"
            scales, biases = quantized.scales, quantized.biases()
        self.settings[layer] = {"group_size": quantized.block, "bits": quantized.bits}
        self._write(name, {name: pack(quantized.codes, quantized.bits), scales_name: scales, biases_name: biases})

    def _put_float(self, name: str, kind: FloatKind) -> None:
        values = self._checkpoint.tensor(name)
        with np.errstate(over="ignore"):  # counted below
            stored = values.astype(_NUMPY[kind])
        infinite, flushed = _losses(values, stored)
        if infinite or flushed:
            self.exceptions[name] = f"float32 ({infinite} values overflow and {flushed} vanish in {_TORCH[kind]})"
            stored = values
        if values.ndim == 2:
            self.settings[name.removesuffix(".weight")] = None
        self._write(name, {name: stored})

    def _write(self, name: str, parts: dict[str, NDArray[Any]]) -> None:
        for part, array in parts.items():
            self._writer.add(part, array)
        self.nbytes[name] = sum(array.nbytes for array in parts.values())

    def _sixteen(self, name: str) -> FloatKind:
        """What the source has if that is a 16-bit float, so that the values stay exact."""
        kinds: dict[str, FloatKind] = {"F16": "F16", "BF16": "BF16"}
        return kinds.get(self._checkpoint.stored(name).kind, self.half)


def _float_kind(checkpoint: Checkpoint, recipe: Recipe) -> FloatKind:
    """The type of scales, biases and vectors; see the module's docstring."""
    if recipe.default.bits == 32:
        return "F32"
    bfloat16 = checkpoint.config.family == "gemma3" or checkpoint.stored(_EMBEDDING).kind == "BF16"
    return "BF16" if bfloat16 else "F16"


def _losses(values: NDArray[Any], stored: NDArray[Any]) -> tuple[int, int]:
    """How many finite values became infinite, and how many non-zero ones zero."""
    return int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(stored))), int(np.count_nonzero((values != 0) & (stored == 0)))


def _scale_names(name: str) -> tuple[str, str]:
    layer = name.removesuffix(".weight")
    return f"{layer}.scales", f"{layer}.biases"


def _quantization(recipe: Recipe, settings: dict[str, dict[str, int] | None]) -> dict[str, Any] | None:
    """mlx-lm's form: what most layers have at the top, every layer that differs by name; None if nothing is quantised."""
    found = [tuple(s.items()) for s in settings.values() if s is not None]
    if not found:
        return None
    common = dict(max(found, key=found.count))
    return common | {"mode": "affine"} | {layer: s or False for layer, s in settings.items() if s != common}


def _config(checkpoint: Checkpoint, kind: FloatKind, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """config.json in Hugging Face's words."""
    c, tokenizer = checkpoint.config, checkpoint.tokenizer
    model_type, architecture = _CLASSES[c.family]
    out: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "vocab_size": c.vocab_rows,
        "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _rope_scaling(c),
        "tie_word_embeddings": c.tied,
        "hidden_act": "silu" if c.activation == "silu" else "gelu_pytorch_tanh",
        "torch_dtype": _TORCH[kind],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.stop_ids),
    }
    if c.family == "gemma3":
        out |= {
            "hidden_activation": out.pop("hidden_act"),
            "query_pre_attn_scalar": round(c.scale**-2, 6),
            "sliding_window": c.sliding_window,
            "sliding_window_pattern": (c.sliding.index(False) if False in c.sliding else c.layers) + 1,
            "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in c.sliding],
            "rope_local_base_freq": c.rope_local_theta,
        }
    return out if quantization is None else out | {"quantization": quantization}


def _rope_scaling(c: DecoderConfig) -> dict[str, Any] | None:
    s = c.rope_scaling
    if s is None:
        return None
    out: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "llama3":
        out |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        out |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
        out |= {} if s.attention_factor is None else {"attention_factor": s.attention_factor}
    return out | ({"original_max_position_embeddings": s.original_context} if s.original_context else {})


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(sha256=hashlib.file_digest(file, "sha256").hexdigest(), nbytes=path.stat().st_size)
