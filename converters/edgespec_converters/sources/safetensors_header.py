"""Safetensors headers, checked before any tensor is mapped: lengths, offsets and shapes are claims by a stranger.

Layout: header length (u64), a JSON object {name: {dtype, shape, data_offsets}}, tensor data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from edgespec.core.errors import ArtifactError
from edgespec_converters.sources.content import describe, parse_object

_MAX_HEADER_BYTES = 16 << 20  # a hundred thousand tensors
_MAX_RANK = 8
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor: `offset` from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(path: Path) -> dict[str, Entry]:
    """Tensors by name. Raises ArtifactError, naming the file and what was found, for anything that does not add up."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if describe(path) != "a safetensors file":
            raise ArtifactError(
                f"{path} is {describe(path)}, not safetensors; edgespec reads weights only from safetensors and GGUF, never from pickles"
            )
        if length > _MAX_HEADER_BYTES:
            raise ArtifactError(f"{path} is damaged: its header claims {length} bytes, allowed are {_MAX_HEADER_BYTES}")
        if 8 + length > size:
            raise ArtifactError(
                f"{path} is truncated: its header needs {length} bytes, {8 + length - size} bytes are missing; download it again"
            )
        header = parse_object(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    where = f"{path} is damaged: tensor {name[:80]!r}"
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ArtifactError(f"{where} has unknown dtype {str(dtype)[:40]!r}")
    dims = _sizes(shape)
    if dims is None or len(dims) > _MAX_RANK:
        raise ArtifactError(f"{where} has no valid shape: {str(shape)[:80]}")
    span = _sizes(offsets)
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise ArtifactError(f"{where} has no valid data_offsets: {str(offsets)[:80]}")
    nbytes = math.prod(dims) * _ITEM_BYTES[dtype]  # Python integers: the product cannot wrap
    if span[1] - span[0] != nbytes:
        raise ArtifactError(
            f"{where} of shape {list(dims)} and dtype {dtype} needs {nbytes} bytes, its data_offsets hold {span[1] - span[0]}"
        )
    return Entry(file=path, dtype=dtype, shape=dims, offset=data_start + span[0], nbytes=nbytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of non-negative 63-bit integers, or None."""
    if not isinstance(value, list):
        return None
    items = cast(list[Any], value)
    return tuple(items) if all(type(v) is int and 0 <= v < 1 << 63 for v in items) else None


def _check_layout(path: Path, entries: dict[str, Entry], data_start: int, size: int) -> None:
    end, before = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end:
            raise ArtifactError(f"{path} is damaged: tensors {before[:80]!r} and {name[:80]!r} overlap")
        end, before = entry.offset + entry.nbytes, name
    if end > size:
        raise ArtifactError(
            f"{path} is truncated: tensor {before[:80]!r} ends at byte {end}, {end - size} bytes are missing; download it again"
        )
