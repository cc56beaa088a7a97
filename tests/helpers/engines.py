"""Every engine there is, each made from a tiny checkpoint, for the contract suites. To add a backend, add one case to `ENGINES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends.mlx import BACKEND as MLX
from edgespec.backends.onnx import BACKEND as ONNX
from edgespec.backends.reference import BACKEND as REFERENCE
from edgespec.backends.reference import ReferenceEngine
from edgespec.core.backend import Backend
from edgespec.core.engine import Engine
from edgespec_converters.checkpoint import MemoryCheckpoint
from edgespec_converters.recipes import Recipe
from edgespec_converters.targets import mlx as mlx_target
from edgespec_converters.targets import onnx as onnx_target
from tests.helpers.packages import write_package


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """`make` builds an engine with float32 weights; its files, if it needs any, go into the folder.

    `atol`: how far logits may lie from those of the same engine recomputing the context from scratch, and from the reference.
    0 demands equal bits from itself.
    """

    name: str
    backend: Backend
    make: Callable[[MemoryCheckpoint, Path], Engine]
    atol: float
    atol_reference: float


def make_reference(checkpoint: MemoryCheckpoint, folder: Path) -> Engine:
    return ReferenceEngine(
        checkpoint.config,
        checkpoint.tensors,
        name=checkpoint.name,
        vocab_size=checkpoint.tokenizer.vocab_size,
        vocab_digest="tiny",
    )


def make_mlx(checkpoint: MemoryCheckpoint, folder: Path, recipe: Recipe | str = "float32") -> Engine:
    manifest = write_package(mlx_target, checkpoint, folder, recipe)
    return MLX.load(folder, manifest, manifest.artifacts[0])


def make_onnx(checkpoint: MemoryCheckpoint, folder: Path, recipe: Recipe | str = "float32") -> Engine:
    manifest = write_package(onnx_target, checkpoint, folder, recipe)
    return ONNX.load(folder, manifest, manifest.artifacts[0])


ENGINES = (
    EngineCase(name="reference", backend=REFERENCE, make=make_reference, atol=0.0, atol_reference=0.0),
    EngineCase(name="mlx", backend=MLX, make=make_mlx, atol=1e-4, atol_reference=1e-4),
    EngineCase(name="onnx", backend=ONNX, make=make_onnx, atol=1e-5, atol_reference=1e-4),
)
