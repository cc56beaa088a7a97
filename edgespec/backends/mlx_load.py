"""From an artifact's files to an engine on MLX."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from edgespec.backends.mlx_decoder import Decoder
from edgespec.backends.mlx_engine import MlxEngine
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Artifact, Manifest


def load(package: Path, manifest: Manifest, artifact: Artifact) -> MlxEngine:
    """Weights go straight from the file into MLX's memory, cast to the type of the activations.

    On Metal that is the type of the norms in the file, as in mlx-lm. On the CPU it is float32, since MLX's 16-bit quantised
    products are some forty times slower there. ArtifactError for damaged or foreign files.
    """
    metal = mx.metal.is_available()
    stream = mx.new_thread_unsafe_stream(mx.gpu if metal else mx.cpu)
    with mx.stream(stream):
        tensors = _read(package, artifact)
        norm = tensors.get("model.norm.weight")
        dtype = norm.dtype if metal and norm is not None else mx.float32
        decoder = Decoder(manifest.decoder, tensors, vocab_size=manifest.vocab_size, dtype=dtype)
        del tensors  # so that what was cast is freed as the evaluation goes
        try:
            mx.eval(decoder.arrays())
        except RuntimeError as error:
            raise _damaged(package / artifact.folder, str(error)) from error
    if metal:
        _keep_resident()
    spec = manifest.spec(artifact, kv_bytes_per_value=dtype.size)
    return MlxEngine(decoder, spec, stream, unit="gpu" if metal else "cpu")


def _read(package: Path, artifact: Artifact) -> dict[str, mx.array]:
    """Every tensor of the artifact, not yet evaluated. MLX itself reads a file that is too short as noise, so sizes come first."""
    tensors: dict[str, mx.array] = {}
    for name, record in sorted(artifact.files.items()):
        path = package / name
        found = path.stat().st_size if path.is_file() else None
        if found != record.nbytes:
            raise _damaged(path, "it is missing" if found is None else f"it has {found} bytes instead of {record.nbytes}")
        if path.suffix != ".safetensors":
            continue
        try:
            part = mx.load(str(path))
        except RuntimeError as error:
            raise _damaged(path, str(error)) from error
        assert isinstance(part, dict)
        tensors |= part
    return tensors


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"cannot read {path}: {why}; convert or pull the model again")


def _keep_resident() -> None:
    """Let MLX keep its buffers wired, up to what macOS recommends, lest idle weights be paged out. Never run by its authors."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit:
        mx.set_wired_limit(int(limit))
