"""ONNX Runtime on a CPU: integer matmuls, KV written in place in NumPy memory, logits read where the library left them.

The graph and its inputs are described in `edgespec_converters.targets.onnx`. Everything a pass needs is bound once per shape
(rows, scored rows, features) and sequence; a pass then only rewrites a few integers. Chains and trees take the same path through
the same graph: a chain's bias is zero, so its rows have the same bits however many are scored together.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.placement_onnx import read_profile
from edgespec.core.cancel import CancelToken
from edgespec.core.decoder import DecoderConfig
from edgespec.core.draft import ancestor_mask, depths, is_chain
from edgespec.core.engine import Cache, Capabilities, ModelSpec, Scores, TokenBatch, check_batch, check_path
from edgespec.core.errors import ContractError, DeviceError
from edgespec.core.placement import Placement
from edgespec.core.scores import Float32, HostLogits, Int32

_MASKED = np.finfo(np.float32).min
_MAX_BOUND_SHAPES = 64
_PASS_ROWS = 128  # a prefill in wider passes is hardly faster and needs twice the memory each time the width doubles
_PROFILED_PASSES = 4  # of one row, the first to warm up
_FATAL_ONLY = 4  # log level: a cancelled run is no error of ours


class OnnxCache:
    """Keys and values of one sequence: float32 [2 · layers, 1, kv heads, capacity + 1, head_dim], layer i at 2 i and 2 i + 1.

    The last row is spare: attention writes one row more than it was given. `host_bytes_copied` counts what committing a side
    branch moves; nothing else is ever copied.
    """

    def __init__(self, owner: OnnxEngine, config: DecoderConfig, capacity: int) -> None:
        self.owner = owner
        self.kv: Float32 = np.zeros((2 * config.layers, 1, config.kv_heads, capacity + 1, config.head_dim), np.float32)
        self.steps = _Steps(owner, self.kv)
        self.pending: Int32 | None = None  # parents of the last batch's rows
        self._length = 0
        self._copied = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        return self.kv.shape[3] - 1

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def host_bytes_copied(self) -> int:
        return self._copied

    def commit(self, nodes: Sequence[int]) -> None:
        check_path(nodes, self.pending)
        in_place = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if moved := len(nodes) - in_place:
            start, end = self._length + in_place, self._length + len(nodes)
            rows = self._length + np.asarray(nodes[in_place:])
            self.kv[:, :, :, start:end] = self.kv[:, :, :, rows]
            self._copied += moved * (self.nbytes // self.kv.shape[3])
        self._length += len(nodes)
        self.pending = None

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate to {length}: {self._length} tokens are committed")
        self._length = length
        self.pending = None


@dataclass(frozen=True, slots=True)
class _Step:
    """One bound shape. The arrays are the graph's inputs and outputs themselves."""

    binding: Any
    values: list[Any]  # owners of the bound memory
    input_ids: Int32  # [1, S]
    position_ids: NDArray[np.int64]  # [1, S + 1]
    bias: dict[str, Float32]  # [S + 1, C] for each kind of layer
    logits: Float32  # [R, V]
    features: Float32 | None  # [S, D]


class _Steps:
    """The bound shapes of one sequence. Their large buffers are shared: each shape sees the first rows."""

    def __init__(self, owner: OnnxEngine, kv: Float32) -> None:
        self.kv_length = np.zeros(1, np.int32)  # tokens in the KV after the pass, the extra row included, less 1
        self._owner = owner
        self._kv = [owner.value(part) for part in kv]
        self._columns = kv.shape[3]
        self._tables = {kind: owner.rotations(layer, self._columns) for kind, layer in owner.kinds.items()}
        self._total = owner.value(np.array([self._columns], np.int32))
        self._kv_length = owner.value(self.kv_length)
        self._bound: dict[tuple[int, int, bool], _Step] = {}
        self._allocate(rows=64, scored=32)

    def get(self, rows: int, scored: int, features: bool) -> _Step:
        if step := self._bound.get((rows, scored, features)):
            return step
        if rows > self._rows or scored > len(self._logits):
            self._allocate(max(rows, self._rows), max(scored, len(self._logits)))
        if len(self._bound) >= _MAX_BOUND_SHAPES:
            self._bound.clear()
        step = self._bound[rows, scored, features] = self._bind(rows, scored, features)
        return step

    def _allocate(self, rows: int, scored: int) -> None:
        self._bound.clear()
        self._rows = rows
        self._bias = {kind: np.zeros((rows + 1, self._columns), np.float32) for kind in self._tables}
        self._logits = np.empty((scored, self._owner.spec.vocab_size), np.float32)

    def _bind(self, rows: int, scored: int, features: bool) -> _Step:
        owner = self._owner
        binding = owner.new_binding()
        values: list[Any] = []
        step = _Step(
            binding,
            values,
            np.zeros((1, rows), np.int32),
            np.zeros((1, rows + 1), np.int64),
            {kind: bias[: rows + 1] for kind, bias in self._bias.items()},
            self._logits[:scored],
            np.empty((rows, owner.spec.hidden), np.float32) if features else None,
        )
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": step.input_ids,
            "position_ids": step.position_ids,
            "rows": np.arange(rows - scored, rows),
            "query_seqlens": np.array([rows + 1], np.int32),
        }
        for kind, (cos, sin) in self._tables.items():
            inputs |= {f"{kind}bias": step.bias[kind][None, None], f"{kind}cos": cos, f"{kind}sin": sin}
        outputs: dict[str, NDArray[Any]] = {"logits": step.logits}
        if step.features is not None:
            outputs["features"] = step.features[None]
        for arrays, bind in ((inputs, binding.bind_ortvalue_input), (outputs, binding.bind_ortvalue_output)):
            for name, array in arrays.items():
                values.append(owner.value(array))
                bind(name, values[-1])
        binding.bind_ortvalue_input("seqlens_k", self._kv_length)
        binding.bind_ortvalue_input("total_sequence_length", self._total)
        for i, value in enumerate(self._kv):
            part = f"{('key', 'value')[i % 2]}.{i // 2}"
            binding.bind_ortvalue_input(f"past_{part}", value)
            binding.bind_ortvalue_output(f"present_{part}", value)
        return step


class OnnxEngine:
    """One session, one thread pool, one pass at a time. Made by `BACKEND.load`."""

    def __init__(
        self,
        session: Any,
        library: Any,
        spec: ModelSpec,
        config: DecoderConfig,
        *,
        width_invariant: bool,
        open_profiled: Callable[[Path], Any],
    ) -> None:
        """`open_profiled` opens a second session like `session`, with its profile in a file whose name begins with the path."""
        self.kinds = _kinds(config)
        self._session: Any = session
        self._library, self._spec, self._config = library, spec, config
        self._open_profiled = open_profiled
        self._capabilities = Capabilities(features=True, width_invariant=width_invariant)
        self._options = library.RunOptions()
        self._options.log_severity_level = _FATAL_ONLY
        self._lock = threading.Lock()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def new_cache(self, capacity: int) -> OnnxCache:
        self._open()
        if not 0 < capacity <= self.spec.max_context:
            raise ValueError(f"a cache of {self.spec.name} holds 1 to {self.spec.max_context} tokens, asked for {capacity}")
        return OnnxCache(self, self._config, capacity)

    def forward(
        self, work: Sequence[tuple[TokenBatch, Cache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        with self._lock:
            own = [(batch, self._own(cache)) for batch, cache in work]
            if len({id(cache) for _, cache in own}) < len(own):
                raise ValueError("a pass takes one batch per cache; give each sequence its own")
            for batch, cache in own:
                check_batch(batch, cache, self._spec, self._capabilities)
            with self._interruptible(cancel):
                scores = [self._score(batch, cache, features) for batch, cache in own]
            for batch, cache in own:
                cache.pending = batch.parents
            return scores

    def placement(self) -> Placement:
        """From a few passes in a second session, which needs the model's memory once more until it is closed again.

        The engine's own session is left alone: profiling can be switched on only when a session opens, and slows it for good.
        """
        self._open()
        with TemporaryDirectory(prefix="edgespec-") as folder:
            twin = OnnxEngine(
                self._open_profiled(Path(folder) / "profile"),
                self._library,
                self._spec,
                self._config,
                width_invariant=self._capabilities.width_invariant,
                open_profiled=self._open_profiled,
            )
            try:
                return twin._profile()
            finally:
                twin.close()

    def close(self) -> None:
        with self._lock:
            self._session = None

    def value(self, array: NDArray[Any]) -> Any:
        """The library's view of `array`, sharing its memory."""
        value = self._library.OrtValue.ortvalue_from_numpy(array)
        if array.size and value.data_ptr() != array.ctypes.data:
            raise ContractError(f"ONNX Runtime copied an array of shape {array.shape} instead of sharing it")
        return value

    def rotations(self, layer: int, positions: int) -> tuple[Float32, Float32]:
        """cos and sin of the rotary angles of a layer, float32 [positions, head_dim / 2] each."""
        inverse, factor = self._config.rope(layer)
        angles = np.outer(np.arange(positions), inverse)
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)

    def new_binding(self) -> Any:
        return self._open().io_binding()

    def _profile(self) -> Placement:
        """Ends the profile that the session was opened with."""
        cache = self.new_cache(1)
        for _ in range(_PROFILED_PASSES):
            self.forward([(TokenBatch.chain([0]), cache)])
        session = self._open()
        assigned: Counter[str] = Counter()
        try:
            for part in session.get_provider_graph_assignment_info():
                assigned[part.ep_name] += len(part.get_nodes())
            text = Path(session.end_profiling()).read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError, *library_errors()) as error:
            raise DeviceError(f"ONNX Runtime gave no profile of {self._spec.name}: {error}") from error
        library = f"ONNX Runtime {self._library.__version__}"
        return read_profile(text, assigned=assigned, options=session.get_provider_options(), library=library)

    def _own(self, cache: Cache) -> OnnxCache:
        if not isinstance(cache, OnnxCache) or cache.owner is not self:
            raise ContractError(f"this engine got a {type(cache).__name__} that it did not make; caches stay with their engine")
        return cache

    def _open(self) -> Any:
        if self._session is None:
            raise DeviceError(f"the engine of {self._spec.name} is closed")
        return self._session

    def _score(self, batch: TokenBatch, cache: OnnxCache, features: bool) -> Scores:
        cache.pending = None  # its rows are about to be overwritten
        if not is_chain(batch.parents):
            step = self._run(cache, cache.length, batch.token_ids, batch.n_scored, features, batch.parents)
            return Scores(HostLogits(step.logits), step.features)
        start = 0
        while not features and len(batch) - start - batch.n_scored >= _PASS_ROWS:  # a long prefill needs no wide activations
            self._run(cache, cache.length + start, batch.token_ids[start : start + _PASS_ROWS], 0, False)
            start += _PASS_ROWS
        if start == len(batch):
            return Scores(HostLogits(np.empty((0, self._spec.vocab_size), np.float32)))
        step = self._run(cache, cache.length + start, batch.token_ids[start:], batch.n_scored, features)
        return Scores(HostLogits(step.logits), step.features)

    def _run(self, cache: OnnxCache, start: int, token_ids: Int32, scored: int, features: bool, parents: Int32 | None = None) -> _Step:
        """One pass over rows that follow `start` tokens; `parents` None: a chain, for which the operator's causal mask will do."""
        n = len(token_ids)
        step = cache.steps.get(n, scored, features)
        cache.steps.kv_length[0] = start + n
        step.input_ids[0] = token_ids
        step.position_ids[0, :n] = np.arange(start, start + n) if parents is None else start + depths(parents)
        step.position_ids[0, n] = start + n
        seen = None if parents is None else ancestor_mask(parents)
        nodes = step.bias[""][:n, start : start + n] if "" in step.bias else None
        try:
            if seen is not None and nodes is not None:
                nodes[~seen] = _MASKED
            if "window_" in step.bias:
                _mask_windows(step, start, self._config.sliding_window, seen)
            self._open().run_with_iobinding(step.binding, self._options)
        except (RuntimeError, *library_errors()) as error:  # the Python layer turns some of its own into RuntimeError
            raise DeviceError(f"ONNX Runtime failed while running {self._spec.name}: {error}") from error
        finally:
            if seen is not None and nodes is not None:
                nodes[:] = 0
        return step

    def _interrupt(self) -> None:
        self._options.terminate = True

    @contextmanager
    def _interruptible(self, cancel: CancelToken | None) -> Generator[None]:
        """Let `cancel` stop the library in the middle of a pass; one that comes too late for that stops here."""
        if cancel is None:
            yield
            return
        cancel.check()
        try:
            with cancel.watch(self._interrupt):
                yield
            cancel.check()
        except DeviceError:
            cancel.check()  # then that is why it failed
            raise
        finally:
            self._options.terminate = False  # nobody watches any more


def _kinds(config: DecoderConfig) -> dict[str, int]:
    """What the names of inputs for global and for sliding layers begin with, and a layer of each."""
    return {"" if config.window(layer) is None else "window_": layer for layer in range(config.layers)}


def input_names(config: DecoderConfig) -> set[str]:
    """The inputs that this engine feeds; a graph with others was written for another version of it."""
    names = {"input_ids", "rows", "position_ids", "query_seqlens", "seqlens_k", "total_sequence_length"}
    names |= {f"{kind}{what}" for kind in _kinds(config) for what in ("bias", "cos", "sin")}
    return names | {f"past_{part}.{layer}" for part in ("key", "value") for layer in range(config.layers)}


def library_errors() -> tuple[type[Exception], ...]:
    """Every exception class of ONNX Runtime's; they have no base of their own."""
    library: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    return tuple(kind for kind in vars(library).values() if isinstance(kind, type) and issubclass(kind, Exception))


def _mask_windows(step: _Step, start: int, window: int, mask: NDArray[np.bool_] | None) -> None:
    """Let row i see the last `window` positions up to its own: columns are committed tokens, then the rows, as far as `bias` allows."""
    n = step.input_ids.shape[1]
    positions = step.position_ids[0, :n]
    columns = np.concatenate([np.arange(start), positions])
    hidden = columns <= positions[:, None] - window
    if mask is not None:
        hidden[:, start:] |= ~mask
    step.bias["window_"][:n, : start + n] = np.where(hidden, _MASKED, np.float32(0))
