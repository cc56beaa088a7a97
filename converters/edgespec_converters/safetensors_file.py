"""Writing safetensors tensor by tensor: the header's room is reserved first and filled in last, so one tensor is in memory at a time.

Format: 8 bytes header length, JSON header padded with spaces, then the data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint32): "U32",
}
_ENTRY_BYTES = 160  # dtype, two dimensions and two offsets with all the digits they can have


class ShardedWriter:
    """Writes `model.safetensors`, or `model-0000i-of-0000n.safetensors` with an index when it takes more than `shard_bytes`.

    Use as a context manager; `nbytes` maps the final file names to their sizes after it has closed without an error.
    """

    def __init__(self, folder: Path, names: Iterable[str], *, shard_bytes: int) -> None:
        """`names`: every tensor that will be added, so that a header has room for all of them."""
        self._folder, self._shard_bytes = folder, shard_bytes
        self._header_bytes = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names) + _ENTRY_BYTES
        self._header_bytes += -self._header_bytes % 8
        self._shards: list[_Shard] = []
        self.nbytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for shard in self._shards[-1:]:
            shard.close()
        if kind is None:
            self._name_shards()

    def add(self, name: str, array: NDArray[Any]) -> None:
        if not self._shards or (self._shards[-1].entries and self._shards[-1].data_bytes + array.nbytes > self._shard_bytes):
            for shard in self._shards[-1:]:
                shard.close()
            self._shards.append(_Shard(self._folder / f"model-{len(self._shards) + 1:05d}.part", self._header_bytes))
        self._shards[-1].add(name, array)

    def _name_shards(self) -> None:
        n = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._shards):
            name = "model.safetensors" if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"
            shard.path.replace(self._folder / name)
            self.nbytes[name] = (self._folder / name).stat().st_size
            weight_map |= dict.fromkeys(shard.entries, name)
        if n > 1:
            index = {"metadata": {"total_size": sum(s.data_bytes for s in self._shards)}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _Shard:
    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        self.data_bytes = 0
        self._header_bytes = header_bytes
        self._file = path.open("wb")
        self._file.seek(8 + header_bytes)

    def add(self, name: str, array: NDArray[Any]) -> None:
        end = self.data_bytes + array.nbytes
        self.entries[name] = {"dtype": _DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [self.data_bytes, end]}
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.data_bytes = end

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "mlx"}} | self.entries, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))
        self._file.close()
