"""GGUF headers, read with every claim checked before anything is allocated for it.

A header is counts, lengths and offsets written by a stranger. Each is compared with the bytes that are really there, so a crafted
file costs no more than its own size. Layout: magic, version, counts, key-values, tensor infos, padding, tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from edgespec.core.errors import ArtifactError
from edgespec_converters.sources.content import shown

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value type → struct code
_STRING, _ARRAY = 8, 9
_MIN_KEY_VALUE_BYTES = 8 + 4 + 1  # key length, value type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, n_dims, one dim, type, offset
_MAX_NAME_BYTES = 65535  # the format's limit for keys
_MAX_STRING_BYTES = 16 << 20
_MAX_ELEMENTS = 1 << 24
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """`shape` slowest axis first (rows, columns), `offset` from the start of the file, `kind` a GGML type."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata as plain Python values by GGUF key, and tensors by GGUF name in file order."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Raises ArtifactError, naming the file and what was found, for a file that is damaged, truncated or crafted."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ArtifactError(f"{path} is no GGUF file: it has only {path.stat().st_size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, str(path)).header()


class _Parser:
    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data = data
        self._where = where
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        tensor_count, field_count = self._preamble()
        fields = self._fields(field_count)
        infos = [self._tensor() for _ in range(tensor_count)]
        start = _aligned(self._at, self._alignment(fields))
        tensors: dict[str, TensorInfo] = {}
        for name, info in infos:
            if name in tensors:
                raise self._error(f"tensor {name[:80]!r} appears twice")
            tensors[name] = TensorInfo(kind=info.kind, shape=info.shape, offset=start + info.offset, nbytes=info.nbytes)
        self._check_layout(tensors, start, self._alignment(fields))
        return GgufHeader(fields=fields, tensors=tensors)

    def _preamble(self) -> tuple[int, int]:
        magic = self._take(4, "the magic")
        if magic != b"GGUF":
            raise self._error(f"it begins with {shown(magic)} instead of 'GGUF'")
        version = self._number("I", "the version")
        if version not in (2, 3):
            hint = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
            raise self._error(f"GGUF version {version}{hint} is not supported, only little-endian 2 and 3")
        tensor_count, field_count = self._number("Q", "the tensor count"), self._number("Q", "the key count")
        left = self._size - self._at
        if tensor_count * _MIN_TENSOR_BYTES + field_count * _MIN_KEY_VALUE_BYTES > left:
            raise self._error(f"it claims {tensor_count} tensors and {field_count} keys, but only {left} bytes follow")
        return tensor_count, field_count

    def _fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a key", _MAX_NAME_BYTES)
            if key in fields:
                raise self._error(f"key {key[:80]!r} appears twice")
            fields[key] = self._value(self._number("I", "a value type"), key)
        return fields

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key[:80]!r}", _MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"key {key[:80]!r} has unknown value type {kind}")
        return self._number(_SCALARS[kind], f"the value of {key[:80]!r}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I", "an array type"), self._number("Q", "an array length")
        if kind == _ARRAY:
            raise self._error(f"key {key[:80]!r} nests arrays, which no supported model does")
        if kind != _STRING and kind not in _SCALARS:
            raise self._error(f"key {key[:80]!r} is an array of unknown type {kind}")
        least = count * (8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind]))
        self._need(least, f"the {count} elements of {key[:80]!r}")
        if count > _MAX_ELEMENTS:
            raise self._error(f"key {key[:80]!r} has {count} elements, more than the {_MAX_ELEMENTS} allowed")
        if kind == _STRING:
            return [self._string(f"an element of {key[:80]!r}", _MAX_STRING_BYTES) for _ in range(count)]
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(least, f"the elements of {key[:80]!r}")))

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string("a tensor name", _MAX_NAME_BYTES)
        label = f"tensor {name[:80]!r}"
        n_dims = self._number("I", f"the rank of {label}")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._error(f"{label} has {n_dims} dimensions, allowed are 1 to {_MAX_DIMS}")
        dims = [self._number("Q", f"the shape of {label}") for _ in range(n_dims)]
        kind_id = self._number("I", f"the type of {label}")
        try:
            kind = gguf.GGMLQuantizationType(kind_id)
        except ValueError:
            raise self._error(f"{label} has unknown type {kind_id}; it may need a newer `gguf` package") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in dims or dims[0] % block:
            raise self._error(f"{label} has shape {dims}, whose rows are not whole blocks of {block} ({kind.name})")
        nbytes = math.prod(dims) // block * block_bytes  # Python integers: the product cannot wrap
        offset = self._number("Q", f"the offset of {label}")
        return name, TensorInfo(kind=kind, shape=tuple(reversed(dims)), offset=offset, nbytes=nbytes)

    def _alignment(self, fields: dict[str, Any]) -> int:
        value = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self._error(f"general.alignment is {value!r}, expected a power of two from 8 to {_MAX_ALIGNMENT}")
        return value

    def _check_layout(self, tensors: dict[str, TensorInfo], start: int, alignment: int) -> None:
        end, before = start, ""
        for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
            if (info.offset - start) % alignment:
                raise self._error(f"tensor {name[:80]!r} starts at {info.offset}, which is not aligned to {alignment}")
            if info.offset < end:
                raise self._error(f"tensors {before[:80]!r} and {name[:80]!r} overlap")
            end, before = info.offset + info.nbytes, name
        if end > self._size:
            raise self._error(
                f"tensor {before[:80]!r} ends at byte {end}, but the file has {self._size}: {end - self._size} bytes are missing"
            )

    def _string(self, what: str, limit: int) -> str:
        length = self._number("Q", f"the length of {what}")
        self._need(length, what)
        if length > limit:
            raise self._error(f"{what} has {length} bytes, more than the {limit} allowed")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._need(count, what)
        self._at += count
        return self._data[self._at - count : self._at]

    def _need(self, count: int, what: str) -> None:
        missing = self._at + count - self._size
        if missing > 0:
            raise self._error(
                f"{what} needs {count} bytes at offset {self._at}, but the file ends at {self._size}: {missing} bytes are missing"
            )

    def _error(self, found: str) -> ArtifactError:
        return ArtifactError(f"{self._where} is damaged, incomplete or no GGUF file: {found}; download it again")


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
