"""What a file is, by its first bytes: names and extensions are claims, not evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.core.errors import ArtifactError

_MAX_JSON_BYTES = 16 << 20
_SIGNATURES = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive (PyTorch saves pickles in one)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<html", "an HTML page"),
)
_PICKLE_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")


def describe(path: Path) -> str:
    """What the file's content looks like, for error messages and for choosing a reader."""
    with path.open("rb") as file:
        head = file.read(32)
    for signature, meaning in _SIGNATURES:
        if head.startswith(signature):
            return meaning
    is_object = head[8:9] == b"{"  # safetensors: a 64-bit header length, then a JSON object
    if head[:1] == b"\x80" and head[1:2] in _PICKLE_PROTOCOLS and not (is_object and head[4:8] == bytes(4)):
        return "a Python pickle"
    if is_object:
        return "a safetensors file"
    return "an empty file" if not head else f"a file that begins with {shown(head[:8])}"


def shown(content: bytes) -> str:
    """Bytes for an error message: as text if they are some, else in hexadecimal."""
    return f"'{content.decode()}'" if content.isascii() and content.decode().isprintable() else f"bytes {content.hex(' ')}"


def is_gguf(path: Path) -> bool:
    return path.is_file() and describe(path) == "a GGUF file"


def map_bytes(path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
    """Part of a file as read-only uint8 [nbytes], in memory only where touched and only while it is held."""
    try:
        return np.memmap(path, np.uint8, mode="r", offset=offset, shape=(nbytes,)).view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: shorter than when its header was read
        raise ArtifactError(f"{path} vanished or shrank while it was being read: {error}") from error


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ArtifactError for anything else."""
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise ArtifactError(f"{path} has {size} bytes, more than the {_MAX_JSON_BYTES} a settings file may have")
    return parse_object(path.read_bytes(), str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object without repeated keys, however deep or malformed `data` is. Raises ArtifactError naming `where`."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ArtifactError(f"{where} nests JSON too deeply; it is damaged or hostile") from error
    except ValueError as error:
        raise ArtifactError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} holds a JSON {type(value).__name__}, expected an object")
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!r} appears twice")
    return out
