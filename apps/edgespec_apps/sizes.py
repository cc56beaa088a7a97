"""How large a model is: from its installed package, else from its name."""

from __future__ import annotations

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Manifest
from edgespec_device_profiles.estimates import BITS, ModelSize, size_from_name


def size_of(name: str, *, bits: float = BITS) -> ModelSize:
    """`bits` per weight where only the name is known. ArtifactError if no such package is installed and the name states no size."""
    from edgespec.orchestrator.store import find_package

    try:
        return size_of_package(find_package(name).manifest)
    except ArtifactError:
        return size_from_name(name, bits=bits)


def size_of_package(manifest: Manifest) -> ModelSize:
    artifact = manifest.artifacts[0]
    decoder = manifest.decoder
    return ModelSize(
        name=manifest.name,
        parameters=artifact.weight_bytes * 8 / artifact.bits_per_weight,
        weight_bytes=artifact.weight_bytes,
        kv_bytes_per_token=2 * decoder.layers * decoder.kv_heads * decoder.head_dim * 2,
    )
