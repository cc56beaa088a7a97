"""GGUF files of the llama, qwen2, qwen3 and gemma3 families as checkpoints.

llama.cpp rotates pairs of rows where Hugging Face rotates halves, and for llama stores q and k in that order; it also stores gemma's
norms with their offset added. Both are undone here, on quantised rows too, so that no target has to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.core.decoder import DecoderConfig
from edgespec.core.errors import ArtifactError
from edgespec.core.scores import Float32
from edgespec_converters.checkpoint import StoredTensor, TokenizerFiles
from edgespec_converters.sources.content import map_bytes
from edgespec_converters.sources.gguf_config import gguf_config, gguf_family
from edgespec_converters.sources.gguf_header import GgufHeader, TensorInfo, read_header
from edgespec_converters.sources.inventory import check_tensors
from edgespec_converters.sources.settings import naming

_CHUNK_ELEMENTS = 1 << 20  # dequantised at once: bounds what is held beside the result
_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_PRE_NORMS = {"ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufCheckpoint:
    """An opened GGUF file. The header is checked at once; tensor data is mapped per call and never kept.

    Raises ArtifactError for a file that is damaged, hostile, or holds a model that edgespec does not support.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_header(path)
        self._fields = header.fields
        gguf_family(header.fields, str(path))
        _check_kinds(header, path)
        factors = header.tensors.get(_ROPE_FACTORS)
        shapes = {name: info.shape for name, info in header.tensors.items()}
        with naming(str(path)):
            self._config = gguf_config(
                header.fields, shapes, str(path), None if factors is None else _dequantise(_map(path, factors), factors)
            )
        self._tensors = {_hugging_face_name(n, self._config): info for n, info in header.tensors.items() if n != _ROPE_FACTORS}
        check_tensors({name: info.shape for name, info in self._tensors.items()}, self._config, str(path))

    @property
    def name(self) -> str:
        return self._path.stem

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def tokenizer(self) -> TokenizerFiles:
        from edgespec_converters.sources.tokenizer_gguf import gguf_tokenizer

        return gguf_tokenizer(self._fields)

    @property
    def license(self) -> str:
        return str(self._fields.get("general.license", ""))

    @property
    def source(self) -> Mapping[str, Any]:
        kinds = Counter(info.kind.name for info in self._tensors.values())
        return {"format": "gguf", "file": self._path.name, "nbytes": self._path.stat().st_size, "tensor_types": dict(sorted(kinds.items()))}

    def names(self) -> list[str]:
        return list(self._config.shapes())

    def tensor(self, name: str) -> Float32:
        stored = self._rows(name)
        values = _dequantise(stored, self._tensors[name])
        if self._is_offset_norm(name):
            values -= np.float32(self._config.norm_offset)
        return values

    def stored(self, name: str) -> StoredTensor:
        info = self._tensors[name]
        if self._is_offset_norm(name):
            return StoredTensor(kind="F32", shape=info.shape, data=self.tensor(name))
        return StoredTensor(kind=info.kind.name, shape=info.shape, data=self._rows(name))

    def _rows(self, name: str) -> NDArray[Any]:
        """The stored tensor, as `StoredTensor.data`, with rows in Hugging Face order."""
        data = _map(self._path, self._tensors[name])
        config = self._config
        if config.family == "llama" and ".q_proj." in name:
            return data[_halves_from_pairs(config.heads, config.head_dim)]
        if config.family == "llama" and ".k_proj." in name:
            return data[_halves_from_pairs(config.kv_heads, config.head_dim)]
        return data

    def _is_offset_norm(self, name: str) -> bool:
        return self._config.norm_offset != 0 and name.endswith("norm.weight")


def _check_kinds(header: GgufHeader, path: Path) -> None:
    """Try each tensor type on one block of zeros: what `gguf` cannot dequantise is refused now, not in mid-conversion."""
    for kind in {info.kind for info in header.tensors.values()}:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            names = [name for name, info in header.tensors.items() if info.kind == kind]
            raise ArtifactError(f"{path}: tensor {names[0]!r} is stored as {kind.name}, which cannot be converted to float32") from error


def _hugging_face_name(name: str, config: DecoderConfig) -> str:
    """The Hugging Face name of a GGUF tensor; a name that the family does not have stays as it is."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk":
        known = _LAYER_NAMES | (_POST_NORMS if config.post_norms else _PRE_NORMS)
        if part := known.get(parts[2]):
            return f"model.layers.{parts[1]}.{part}.{parts[3]}"
    return name


def _map(path: Path, info: TensorInfo) -> NDArray[Any]:
    """[shape…] for plain types, uint8 [rows, bytes per row] for block types."""
    raw = map_bytes(path, info.offset, info.nbytes)
    if plain := _PLAIN.get(info.kind.name):
        return raw.view(plain).reshape(info.shape)
    block, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
    return raw.reshape(-1, info.shape[-1] // block * block_bytes)


def _dequantise(data: NDArray[Any], info: TensorInfo) -> Float32:
    """float32 [shape…], a few rows at a time."""
    if info.kind.name in _PLAIN:
        return data.astype(np.float32)
    out = np.empty((len(data), info.shape[-1]), np.float32)
    step = max(_CHUNK_ELEMENTS // info.shape[-1], 1)
    for start in range(0, len(data), step):
        out[start : start + step] = gguf.quants.dequantize(data[start : start + step], info.kind)
    return out.reshape(info.shape)


def _halves_from_pairs(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Index of the GGUF row for each Hugging Face row: row (head, half, i) is stored as (head, i, half)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).ravel()
