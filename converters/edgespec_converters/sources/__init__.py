"""Readers of other people's model files. Read-only; nothing in a file is executed, and no claim of a header is believed."""

from __future__ import annotations

from pathlib import Path

from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import Checkpoint
from edgespec_converters.sources.content import describe, is_gguf


def open_source(path: Path) -> Checkpoint:
    """A GGUF file, a folder with one, or a Hugging Face folder, told apart by content. Raises ArtifactError for anything else."""
    try:
        return _open(path)
    except OSError as error:
        raise ArtifactError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> Checkpoint:
    from edgespec_converters.sources.gguf import GgufCheckpoint
    from edgespec_converters.sources.hf import HfCheckpoint

    if path.is_file():
        if is_gguf(path):
            return GgufCheckpoint(path)
        raise ArtifactError(f"{path} is {describe(path)}; give a GGUF file, or a folder with config.json and safetensors")
    if not path.is_dir():
        raise ArtifactError(f"{path} does not exist, or is neither a file nor a folder")
    if (path / "config.json").is_file():
        return HfCheckpoint(path)
    found = [p for p in sorted(path.iterdir()) if is_gguf(p)]
    if len(found) == 1:
        return GgufCheckpoint(found[0])
    if found:
        raise ArtifactError(f"{path} holds {len(found)} GGUF files ({', '.join(p.name for p in found[:4])}); name one of them")
    raise ArtifactError(f"{path} holds neither a config.json nor a GGUF file")
