"""The door to MLX: says whether it works here, and imports it only then (see `mlx_engine` and `mlx_decoder`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.core.errors import CapabilityError
from edgespec.core.manifest import Artifact, Manifest

if TYPE_CHECKING:
    from edgespec.backends.mlx_engine import MlxEngine


_PACKAGE = "'mlx[cpu]'" if sys.platform == "linux" else "mlx"


class MlxBackend:
    name = "mlx"
    artifact_engines = ("mlx",)

    def why_not(self) -> str | None:
        try:
            core = importlib.import_module("mlx.core")
        except ImportError as error:
            return f"MLX cannot be imported ({error}); run: pip install {_PACKAGE}"
        # Came with 0.32. Older ones tie streams to threads, and rotate rows of a tree wrongly on Metal.
        if not hasattr(core, "new_thread_unsafe_stream"):
            return f"MLX {importlib.metadata.version('mlx')} is too old; pip install 'mlx>=0.32'"
        return None

    def describe(self) -> str:
        if reason := self.why_not():
            return reason
        import mlx.core as mx

        unit = "Metal" if mx.metal.is_available() else "the CPU (for correctness, slow)"
        return f"MLX {importlib.metadata.version('mlx')} on {unit}, {mx.device_info().get('device_name', 'unknown device')}"

    def load(self, package: Path, manifest: Manifest, artifact: Artifact, *, threads: int | None = None) -> MlxEngine:
        """See `mlx_load.load`. CapabilityError for a number of threads: MLX chooses that itself."""
        if reason := self.why_not():
            raise CapabilityError(reason)
        if threads is not None:
            raise CapabilityError(f"MLX chooses its threads itself, cannot use {threads}; leave the number of threads out")
        from edgespec.backends.mlx_load import load

        return load(package, manifest, artifact)


BACKEND = MlxBackend()
