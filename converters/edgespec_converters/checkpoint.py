"""What every source yields and every target reads: an architecture, named tensors and a tokenizer, opened read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.core.decoder import DecoderConfig
from edgespec.core.scores import Float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it, so that formats which map exactly stay exact.

    `kind` is a GGML type name ("Q8_0", "Q4_0", "F16", …) or "BF16"/"F16"/"F32". For block types `data` is uint8
    [rows, bytes per row]; otherwise [shape…]. `shape` is the logical shape. Rows are already in Hugging Face order.
    """

    kind: str
    shape: tuple[int, ...]
    data: NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a source knows of its tokenizer, ready to be written beside a manifest.

    `content` is the bytes of a `tokenizers` JSON or a sentencepiece model. `stop_ids` is the union of every end-of-text
    and end-of-turn id found. `vocab_size` counts real ids.
    """

    kind: str  # "tokenizers" | "sentencepiece"
    content: bytes
    vocab_size: int
    add_bos: bool
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None = None


class Checkpoint(Protocol):
    """Read-only and memory-mapped: `tensor` reads and dequantises one tensor at a time, nothing is kept."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def tokenizer(self) -> TokenizerFiles: ...
    @property
    def license(self) -> str: ...
    @property
    def source(self) -> Mapping[str, Any]:
        """Where it came from, for the manifest: format, file name, sha256 if known."""
        ...

    def names(self) -> list[str]:
        """Names as in `DecoderConfig.shapes()`."""
        ...

    def tensor(self, name: str) -> Float32:
        """float32, Hugging Face name, row order and norm convention. KeyError for a name that is not there."""
        ...

    def stored(self, name: str) -> StoredTensor: ...


@dataclass(slots=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint held in memory: tiny models in tests, and whoever has arrays already."""

    config: DecoderConfig
    tensors: dict[str, Float32]
    tokenizer: TokenizerFiles
    name: str = "memory"
    license: str = ""
    source: Mapping[str, Any] = field(default_factory=lambda: {"format": "memory"})

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Float32:
        return np.asarray(self.tensors[name], np.float32)

    def stored(self, name: str) -> StoredTensor:
        data = self.tensors[name]
        return StoredTensor(kind="F32", shape=data.shape, data=data)


def open_checkpoint(source: Path) -> Checkpoint:
    """A GGUF file or a Hugging Face folder, told apart by content. Raises ArtifactError for anything else."""
    from edgespec_converters.sources import open_source

    return open_source(source)
