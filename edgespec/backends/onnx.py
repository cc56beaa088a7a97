"""ONNX Runtime on a CPU: integer matmuls, KV written in place in NumPy memory, logits read where the library left them.

The graph and its inputs are described in `edgespec_converters.targets.onnx`. Everything a pass needs is bound once per shape
(rows, scored rows, features) and sequence; a pass then only rewrites a few integers. Chains and trees take the same path through
the same graph: a chain's bias is zero, so its rows have the same bits however many are scored together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from edgespec.core.cancel import CancelToken
from edgespec.core.decoder import DecoderConfig
from edgespec.core.draft import ancestor_mask, depths, is_chain
from edgespec.core.engine import Capabilities, ModelSpec, Scores, TokenBatch, check_batch, check_path
from edgespec.core.errors import ArtifactError, CapabilityError, ContractError, DeviceError
from edgespec.core.manifest import Artifact, Manifest
from edgespec.core.scores import Float32, HostLogits, Int32

_GRAPH_FILE = "model.onnx"
_MIN_VERSION = (1, 32)  # GroupQueryAttention with query_seqlens
_MASKED = np.finfo(np.float32).min
_MAX_BOUND_SHAPES = 64
_ERRORS_ONLY, _FATAL_ONLY = 3, 4  # ONNX Runtime's log levels; a cancelled run is no error of ours


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
