"""The decoder in NumPy float32, obvious and slow: the twin that every other engine is compared with.

Logits of a row do not depend, bit for bit, on which rows are scored with it: every product is one matrix times one vector, and
every row attends over its own contiguous copy of what it sees, so the same library calls run on the same numbers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.core.cancel import CancelToken
from edgespec.core.decoder import DecoderConfig
from edgespec.core.draft import depths, path_to
from edgespec.core.engine import Cache, Capabilities, ModelSpec, Scores, TokenBatch, check_batch, check_path
from edgespec.core.errors import ArtifactError, CapabilityError, ContractError, DeviceError
from edgespec.core.manifest import Artifact, Manifest
from edgespec.core.placement import Placement
from edgespec.core.scores import Float32, Float64, HostLogits, Int32

Product = Callable[[Float32, Float32], Float32]  # weight [N, K], x [n, K] -> [n, N]
Attend = Callable[[Float32, Float32, Float32], Float32]  # q [n, H, D], k and v [n, KV, D] -> [n, H, D]


def embed(config: DecoderConfig, table: Float32, token_ids: Int32) -> Float32:
    """float32 [n, hidden]."""
    return table[token_ids] * np.float32(config.embed_scale)


def layer(
    config: DecoderConfig, index: int, tensors: Mapping[str, Float32], x: Float32, positions: Int32, attend: Attend, product: Product
) -> Float32:
    """One decoder layer: `x` [n, hidden] at `positions` [n] in, [n, hidden] out."""
    prefix = f"model.layers.{index}."

    def project(name: str, x: Float32) -> Float32:
        out = product(tensors[f"{prefix}{name}.weight"], x)
        bias = tensors.get(f"{prefix}{name}.bias")
        return out if bias is None else out + bias

    def normed(name: str, x: Float32) -> Float32:
        return norm(config, tensors[f"{prefix}{name}.weight"], x)

    attention_in = normed("input_layernorm", x)
    q = project("self_attn.q_proj", attention_in).reshape(len(x), config.heads, config.head_dim)
    k = project("self_attn.k_proj", attention_in).reshape(len(x), config.kv_heads, config.head_dim)
    v = project("self_attn.v_proj", attention_in).reshape(len(x), config.kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = normed("self_attn.q_norm", q), normed("self_attn.k_norm", k)
    frequencies, factor = config.rope(index)
    seen = attend(rotate(q, positions, frequencies, factor), rotate(k, positions, frequencies, factor), v)
    attention_out = project("self_attn.o_proj", seen.reshape(len(x), -1))
    if config.post_norms:
        x = x + normed("post_attention_layernorm", attention_out)
        mlp_in = normed("pre_feedforward_layernorm", x)
    else:
        x = x + attention_out
        mlp_in = normed("post_attention_layernorm", x)
    gate = activate(config, project("mlp.gate_proj", mlp_in))
    mlp_out = project("mlp.down_proj", gate * project("mlp.up_proj", mlp_in))
    return x + (normed("post_feedforward_layernorm", mlp_out) if config.post_norms else mlp_out)


def norm(config: DecoderConfig, weight: Float32, x: Float32) -> Float32:
    """Root mean square norm over the last axis."""
    root: Float32 = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(config.norm_eps))
    scale: Float32 = weight + np.float32(config.norm_offset)
    return np.multiply(x / root, scale, dtype=np.float32)


def rotate(x: Float32, positions: Int32, frequencies: Float64, factor: float) -> Float32:
    """Rotary embedding of `x` [n, heads, D]: dimension i turns together with dimension i + D/2 (Su et al. 2021, section 3.4.2)."""
    angles = positions[:, None, None] * frequencies  # [n, 1, D/2]
    cos: Float32 = (np.cos(angles) * factor).astype(np.float32)
    sin: Float32 = (np.sin(angles) * factor).astype(np.float32)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1, dtype=np.float32)


def activate(config: DecoderConfig, x: Float32) -> Float32:
    if config.activation == "silu":
        with np.errstate(over="ignore"):  # exp(-x) may be infinite: then the sigmoid is 0, as it should
            return x / (np.float32(1) + np.exp(-x))
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def softmax(scores: Float32) -> Float32:
    """Over the last axis."""
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class ReferenceCache:
    """Committed keys and values float32 [layers, capacity, kv_heads, head_dim], and those of the last batch beside them."""

    def __init__(self, config: DecoderConfig, capacity: int) -> None:
        shape = (config.layers, capacity, config.kv_heads, config.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._length = 0
        self._pending: tuple[Int32, Float32, Float32] | None = None  # parents [n], keys and values [layers, n, kv_heads, head_dim]

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def host_bytes_copied(self) -> int:
        return 0

    def hold(self, parents: Int32, keys: Float32, values: Float32) -> None:
        """Remember the last batch's keys and values [layers, n, kv_heads, head_dim] until `commit`."""
        self._pending = parents, keys, values

    def commit(self, nodes: Sequence[int]) -> None:
        check_path(nodes, None if self._pending is None else self._pending[0])
        assert self._pending is not None
        _, keys, values = self._pending
        end = self._length + len(nodes)
        self.keys[:, self._length : end] = keys[:, list(nodes)]
        self.values[:, self._length : end] = values[:, list(nodes)]
        self._length, self._pending = end, None

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: {self._length} tokens are committed")
        self._length, self._pending = length, None


class ReferenceEngine:
    """A decoder from its config and its float32 tensors, by the names of `DecoderConfig.shapes()`."""

    def __init__(
        self, config: DecoderConfig, tensors: Mapping[str, Float32], *, name: str, vocab_size: int, vocab_digest: str, weight_bytes: int = 0
    ) -> None:
        """`weight_bytes`: size of the weights as stored; 0 takes their float32 size. ArtifactError for missing or misshapen tensors."""
        self.config = config
        self._tensors = {tensor: tensors[tensor] for tensor in config.shapes() if tensor in tensors}
        for tensor, shape in config.shapes().items():
            found = self._tensors[tensor].shape if tensor in self._tensors else None
            if found != shape:
                raise ArtifactError(f"{name}: tensor {tensor} should have shape {shape}, found {found}; convert the model again")
        self._head = self._tensors["model.embed_tokens.weight" if config.tied else "lm_head.weight"][:vocab_size]
        self._lock = threading.Lock()
        self._spec = ModelSpec(
            name=name,
            vocab_size=vocab_size,
            vocab_digest=vocab_digest,
            max_context=config.max_context,
            layers=config.layers,
            hidden=config.hidden,
            weight_bytes=weight_bytes or sum(t.nbytes for t in self._tensors.values()),
            kv_bytes_per_token=config.kv_bytes_per_token(),
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(features=True, max_sequences=1 << 16, width_invariant=True)

    def new_cache(self, capacity: int) -> ReferenceCache:
        if not 0 < capacity <= self.spec.max_context:
            raise ValueError(f"a cache of {self.spec.name} holds 1 to {self.spec.max_context} tokens, asked for {capacity}")
        return ReferenceCache(self.config, capacity)

    def forward(
        self, work: Sequence[tuple[TokenBatch, Cache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        with self._lock:
            if not self._tensors:
                raise DeviceError(f"the engine of {self.spec.name} is closed")
            for batch, cache in work:
                check_batch(batch, cache, self.spec, self.capabilities)
            done = [(cache, batch, *self._score(batch, _own(cache), cancel)) for batch, cache in work]
            for cache, batch, _, keys, values in done:
                _own(cache).hold(batch.parents, keys, values)
            return [Scores(self._logits(x[len(x) - batch.n_scored :]), x if features else None) for _, batch, x, _, _ in done]

    def placement(self) -> Placement:
        """NumPy knows no other unit. Layers, embedding and head are the nodes."""
        return Placement.whole("cpu", self._spec.layers + 2, by="NumPy", source="NumPy runs on the CPU only")

    def close(self) -> None:
        with self._lock:
            self._tensors.clear()

    def _score(self, batch: TokenBatch, cache: ReferenceCache, cancel: CancelToken | None) -> tuple[Float32, Float32, Float32]:
        """Hidden states [n, hidden] before the final norm, and the batch's keys and values [layers, n, kv_heads, head_dim]."""
        positions = cache.length + depths(batch.parents)
        paths = [path_to(batch.parents, i) for i in range(len(batch))]
        x = embed(self.config, self._tensors["model.embed_tokens.weight"], batch.token_ids)
        keys: list[Float32] = []
        values: list[Float32] = []
        for index in range(self.config.layers):
            if cancel is not None:
                cancel.check()

            def attend(q: Float32, k: Float32, v: Float32, index: int = index) -> Float32:
                keys.append(k)
                values.append(v)
                committed_k, committed_v = cache.keys[index, : cache.length], cache.values[index, : cache.length]
                window = self.config.window(index) or 0  # [-0:] is everything
                rows = [
                    _attend_row(
                        q[i],
                        np.concatenate([committed_k, k[path]])[-window:],
                        np.concatenate([committed_v, v[path]])[-window:],
                        self.config.scale,
                    )
                    for i, path in enumerate(paths)
                ]
                return np.stack(rows)

            x = layer(self.config, index, self._tensors, x, positions, attend, _row_by_row)
        return x, np.stack(keys), np.stack(values)

    def _logits(self, x: Float32) -> HostLogits:
        return HostLogits(_row_by_row(self._head, norm(self.config, self._tensors["model.norm.weight"], x)))


def _own(cache: Cache) -> ReferenceCache:
    if not isinstance(cache, ReferenceCache):
        raise ContractError(f"the reference engine got a {type(cache).__name__}; caches stay with the engine that made them")
    return cache


def _row_by_row(weight: Float32, x: Float32) -> Float32:
    out = np.empty((len(x), len(weight)), np.float32)
    for i, row in enumerate(x):
        out[i] = weight @ row
    return out


def _attend_row(q: Float32, keys: Float32, values: Float32, scale: float) -> Float32:
    """One query [H, D] over what it sees [L, KV, D] -> [H, D]; neighbouring query heads share a key head."""
    heads, head_dim = q.shape
    grouped = q.reshape(keys.shape[1], -1, head_dim)  # [KV, H/KV, D]
    weights = softmax(grouped @ keys.transpose(1, 2, 0) * np.float32(scale))  # [KV, H/KV, L]
    return (weights @ values.transpose(1, 0, 2)).reshape(heads, head_dim)


class ReferenceBackend:
    name = "reference"
    artifact_engines = ("mlx",)

    def why_not(self) -> str | None:
        return None

    def describe(self) -> str:
        return f"NumPy {np.__version__}, float32 on the CPU (for comparison, slow)"

    def load(self, package: Path, manifest: Manifest, artifact: Artifact, *, threads: int | None = None) -> ReferenceEngine:
        """Weights are unpacked to float32: 4 bytes each in memory. CapabilityError for a number of threads:
        NumPy's library keeps its own."""
        if threads is not None:
            raise CapabilityError(
                f"the reference engine does not choose its threads, cannot use {threads}; leave the number of threads out"
            )
        return ReferenceEngine(
            manifest.decoder,
            StoredWeights(package / artifact.folder),
            name=manifest.name,
            vocab_size=manifest.vocab_size,
            vocab_digest=manifest.vocab_digest,
            weight_bytes=artifact.weight_bytes,
        )


BACKEND = ReferenceBackend()


class StoredWeights(Mapping[str, Float32]):
    """The tensors of a safetensors folder in mlx-lm's layout, each read and unpacked to float32 when asked for.

    Raises ArtifactError for files that are missing, cut short or contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # by the names stored in them
        with _damage(folder):
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self._quantization: dict[str, Any] = config.get("quantization") or {}
            for path in sorted(folder.glob("*.safetensors")):
                file = _open_safetensors(path)
                self._files |= dict.fromkeys(file.keys(), file)
        self._names = [name for name in self._files if not name.endswith((".scales", ".biases"))]

    def __getitem__(self, name: str) -> Float32:
        layer = name.removesuffix(".weight")
        with _damage(self._folder):
            data = self._read(name)
            if f"{layer}.scales" not in self._files:
                return data.astype(np.float32)
            bits = (self._quantization.get(layer) or self._quantization)["bits"]
            return _unpack(data, self._read(f"{layer}.scales"), self._read(f"{layer}.biases"), bits)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def _read(self, name: str) -> NDArray[Any]:
        return self._files[name].get_tensor(name)


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="np")


@contextmanager
def _damage(folder: Path) -> Generator[None]:
    """Turn whatever damaged files raise inside the block into an ArtifactError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {folder}: {type(error).__name__}: {error}; convert the model again") from error


def _unpack(packed: NDArray[np.uint32], scales: NDArray[Any], biases: NDArray[Any], bits: int) -> Float32:
    """Codes uint32 [N, K bits / 32], lowest bits first; scales and biases [N, K / group]: weight = code * scale + bias."""
    if bits not in (4, 8):
        raise ValueError(f"weights have {bits} bits, 4 and 8 are known")
    octets = np.ascontiguousarray(packed, "<u4").view(np.uint8)
    codes = octets if bits == 8 else np.stack([octets & 0x0F, octets >> 4], axis=-1)
    blocks = codes.reshape(*scales.shape, -1).astype(np.float32)
    blocks *= scales[:, :, None].astype(np.float32)
    blocks += biases[:, :, None].astype(np.float32)
    return blocks.reshape(len(packed), -1)
