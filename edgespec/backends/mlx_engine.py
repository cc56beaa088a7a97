"""Engine, cache and logits on MLX: Metal on a Mac, else MLX's CPU backend (correct and slow).

Every array stays with MLX. Keys and values are written in place, rolled back by length and compacted on the device; logits and
features are seen from NumPy through MLX's own memory, which host and device share on both units.

MLX ties ordinary streams to the thread that made them, and sessions run in threads of their own. So an engine owns one stream that
any thread may use, and one lock for the whole process lets one thread at a time build and evaluate graphs.

Never run on Metal by its authors: 16-bit activations, the wired limit, and speed there.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx_decoder import Decoder, Positions
from edgespec.core.cancel import CancelToken
from edgespec.core.engine import Cache, Capabilities, ModelSpec, Scores, TokenBatch, check_batch, check_path
from edgespec.core.errors import ContractError, DeviceError
from edgespec.core.placement import Placement
from edgespec.core.scores import Float32, HostLogits, Int32

KV_STEP = 256  # rows a cache grows by, at least
LONG_BATCH = 64  # rows from which a pass is worth cutting at its layers, so that a cancel acts inside it

_DEVICE = threading.Lock()


class MlxLogits:
    """`values` float32 [n, V] on the device, `best` uint32 [n]; evaluated before anyone asks."""

    def __init__(self, engine: MlxEngine, values: mx.array, best: mx.array) -> None:
        self._engine, self.values, self.best = engine, values, best

    def __len__(self) -> int:
        return self.values.shape[0]

    def argmax(self) -> Int32:
        """MLX breaks ties for the lowest id."""
        return np.asarray(self.best).astype(np.int32)

    def gather(self, ids: Int32) -> Float32:
        with self._engine.device():
            found = mx.take_along_axis(self.values, mx.array(ids.astype(np.int32))[:, None], axis=1)[:, 0]
            mx.eval(found)
        return np.array(found)

    def row(self, i: int) -> Float32:
        """A view of MLX's memory."""
        return np.asarray(self.values)[i]


class MlxCache:
    """Keys and values [1, kv_heads, rows, head_dim] of each layer. Rows grow by doubling, so a short answer stays small."""

    host_bytes_copied = 0  # host and device share the memory

    def __init__(self, engine: MlxEngine, capacity: int) -> None:
        self._engine, self._capacity = engine, capacity
        self._length = 0
        self._rows = 0
        self._pending: Int32 | None = None  # parents of the last batch
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []

    @property
    def engine(self) -> MlxEngine:
        return self._engine

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def commit(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self._pending)
        moved = next((i for i, node in enumerate(nodes) if node != i), None)
        if moved is not None:
            self._compact([self._length + node for node in nodes[moved:]], self._length + moved)
        self._length += len(nodes)
        self._pending = None

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: {self._length} tokens are committed")
        self._length, self._pending = length, None

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows, inside the engine's device block. What was pending is given up: a pass overwrites it."""
        self._pending = None
        if rows <= self._rows:
            return
        grown = min(max(_round_up(rows), 2 * self._rows), _round_up(self._capacity))
        config, dtype = self._engine.decoder.config, self._engine.decoder.dtype
        for arrays in (self.keys, self.values):
            more = [mx.zeros((1, config.kv_heads, grown - self._rows, config.head_dim), dtype=dtype) for _ in range(config.layers)]
            arrays[:] = [mx.concatenate([old, new], axis=2) for old, new in zip(arrays, more, strict=True)] if arrays else more
        mx.eval(self.keys, self.values)
        self._rows = grown

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Put the batch's rows [1, kv_heads, n, head_dim] behind the committed ones; the whole buffers, for reading.

        Assignment lets MLX reuse the buffer in place, as nothing else refers to it when the graph runs.
        """
        end = self._length + keys.shape[2]
        self.keys[layer][:, :, self._length : end] = keys
        self.values[layer][:, :, self._length : end] = values
        return self.keys[layer], self.values[layer]

    def hold(self, parents: Int32) -> None:
        """The batch's rows are written; `commit` may now keep a path of them."""
        self._pending = parents

    def _compact(self, rows: list[int], start: int) -> None:
        """Move rows, which lie behind `start` in rising order, together there."""
        with self._engine.device():
            index, end = mx.array(rows), start + len(rows)
            moved = [[mx.take(array, index, axis=2) for array in arrays] for arrays in (self.keys, self.values)]
            mx.eval(moved)  # first: a buffer that a running kernel still reads is copied, not written in place
            for arrays, taken in zip((self.keys, self.values), moved, strict=True):
                for array, part in zip(arrays, taken, strict=True):
                    array[:, :, start:end] = part
            mx.eval(self.keys, self.values)


class MlxEngine:
    """One model on one MLX device. Several caches may be alive, used from any thread; passes run one after the other."""

    def __init__(self, decoder: Decoder, spec: ModelSpec, stream: mx.Stream, *, unit: str) -> None:
        self._decoder: Decoder | None = decoder
        self._spec, self._stream = spec, stream
        self._capabilities = Capabilities(unit=unit, features=True)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def decoder(self) -> Decoder:
        if self._decoder is None:
            raise DeviceError(f"the engine of {self._spec.name} is closed")
        return self._decoder

    def new_cache(self, capacity: int) -> MlxCache:
        if not 0 < capacity <= self._spec.max_context:
            raise ValueError(f"a cache of {self._spec.name} holds 1 to {self._spec.max_context} tokens, asked for {capacity}")
        return MlxCache(self, capacity)

    def forward(
        self, work: Sequence[tuple[TokenBatch, Cache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        """`features` are the hidden states before the final norm, float32 [n, hidden], as an MLX array; `np.asarray` views them."""
        if len(work) > self._capabilities.max_sequences:
            raise ValueError(f"this engine scores {self._capabilities.max_sequences} sequence at a time, got {len(work)}")
        for batch, cache in work:
            check_batch(batch, cache, self._spec, self._capabilities)
        return [self._score(batch, self._own(cache), features, cancel) for batch, cache in work]

    def placement(self) -> Placement:
        """Known without measuring: MLX runs what is put on a stream on that stream's device. There is no graph, so layers,
        embedding and head are the nodes."""
        unit = self._capabilities.unit
        by = "MLX on Metal" if unit == "gpu" else "MLX on the CPU"
        return Placement.whole(unit, self._spec.layers + 2, by=by, source="MLX keeps to the device of its stream")

    def close(self) -> None:
        """Give the weights back. Caches still alive keep their memory, but can no longer be scored."""
        with _DEVICE:
            self._decoder = None
            mx.clear_cache()

    @contextmanager
    def device(self) -> Generator[None]:
        """The device for one thread at a time; MLX's errors come out as DeviceError."""
        with _DEVICE, mx.stream(self._stream):
            try:
                yield
            except (RuntimeError, MemoryError, ValueError) as error:
                raise DeviceError(f"MLX failed: {error}") from error

    def _score(self, batch: TokenBatch, cache: MlxCache, features: bool, cancel: CancelToken | None) -> Scores:
        with self.device():
            if cancel is not None:
                cancel.check()
            cache.reserve(cache.length + len(batch))
            x = self._hidden(batch, cache, cancel)[0]  # [n, hidden]
            hidden = x.astype(mx.float32) if features else None
            logits = self._logits(x[len(batch) - batch.n_scored :]) if batch.n_scored else None
            wanted = [] if logits is None else [logits.values, logits.best]
            mx.eval(wanted, cache.keys, cache.values, hidden)
        cache.hold(batch.parents)
        return Scores(HostLogits(np.empty((0, self._spec.vocab_size), np.float32)) if logits is None else logits, hidden)

    def _logits(self, x: mx.array) -> MlxLogits:
        """Not yet evaluated. Nearly every judge asks for the best ids, and a second trip to the device costs more than their search."""
        values = self.decoder.logits(x)
        return MlxLogits(self, values, mx.argmax(values, axis=-1))

    def _hidden(self, batch: TokenBatch, cache: MlxCache, cancel: CancelToken | None) -> mx.array:
        """[1, n, hidden] before the final norm. A kernel that runs cannot be stopped, but there need not be a next one."""
        positions = Positions(batch, cache.length)
        x = self.decoder.embed(mx.array(batch.token_ids))
        for index in range(self._spec.layers):
            x = self._layer(index, x, positions, cache)
            if cancel is not None and len(batch) >= LONG_BATCH:
                mx.eval(x, cache.keys[index], cache.values[index])
                cancel.check()
        return x

    def _layer(self, index: int, x: mx.array, positions: Positions, cache: MlxCache) -> mx.array:
        scale, window = self.decoder.attention(index)
        start, mask = positions.visible(window)
        end = positions.length + positions.n

        def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            keys, values = cache.write(index, k, v)
            seen = keys[:, :, start:end], values[:, :, start:end]
            return mx.fast.scaled_dot_product_attention(q, *seen, scale=scale, mask=mask)

        return self.decoder.layer(index, x, positions, attend)

    def _own(self, cache: Cache) -> MlxCache:
        if not isinstance(cache, MlxCache) or cache.engine is not self:
            raise ContractError(
                f"{self._spec.name} got another engine's {type(cache).__name__}; caches stay with the engine that made them"
            )
        return cache


def _round_up(rows: int) -> int:
    return -(-rows // KV_STEP) * KV_STEP
