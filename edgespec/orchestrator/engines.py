"""Which backend runs a package's artifact: chosen by capability, refused with the reason."""

from __future__ import annotations

import importlib
import platform
import sys
from typing import cast

from edgespec.core.backend import Backend
from edgespec.core.engine import Engine
from edgespec.core.errors import ArtifactError, CapabilityError
from edgespec.core.manifest import Artifact, Manifest
from edgespec.orchestrator.store import Package

NAMES = ("onnx", "mlx", "reference")


def backend(name: str) -> Backend:
    """Import one backend. ValueError for a name that is none."""
    if name not in NAMES:
        raise ValueError(f"engine must be auto, {', '.join(NAMES)}; got {name!r}")
    return cast(Backend, importlib.import_module(f"edgespec.backends.{name}").BACKEND)


def preference() -> tuple[str, ...]:
    """Fastest first: MLX where there is Metal, else ONNX Runtime; the reference engine only when asked for."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return ("mlx", "onnx") if apple else ("onnx", "mlx")


def choose(manifest: Manifest, engine: str, recipe: str | None) -> tuple[str, Artifact]:
    """The backend's name and the artifact it will load. CapabilityError says what stands in the way of each candidate."""
    recipes = list(dict.fromkeys(artifact.recipe for artifact in manifest.artifacts))
    if recipe is not None and recipe not in recipes:
        raise CapabilityError(
            f"{manifest.name} has no recipe {recipe!r}; it has {', '.join(recipes) or 'none'}"
            f" (`edgespec convert {manifest.name} --recipe NAME` adds one)"
        )
    reasons: list[str] = []
    broken = False  # a library is missing: another artifact would not help
    for name in preference() if engine == "auto" else (engine,):
        candidate = backend(name)
        if (why := candidate.why_not()) is not None:
            reasons.append(f"{name}: {why}")
            broken = True
            continue
        for kind in candidate.artifact_engines:
            if (artifact := manifest.find(kind, recipe)) is not None:
                return name, artifact
        has = ", ".join(f"{a.engine}/{a.recipe}" for a in manifest.artifacts) or "nothing"
        reasons.append(
            f"{name}: no {'/'.join(candidate.artifact_engines)} artifact{f' for recipe {recipe}' if recipe else ''} (it has {has})"
        )
    where = "any engine here" if engine == "auto" else engine
    convert = f"edgespec convert {manifest.name} --targets {'mlx' if engine in ('mlx', 'reference') else 'onnx'}"
    advice = "" if broken else f". To add one: {convert}{f' --recipe {recipe}' if recipe else ''}"
    raise CapabilityError(f"{manifest.name} cannot run on {where}: {'; '.join(reasons)}{advice}")


def able(manifest: Manifest, recipe: str | None) -> tuple[str, ...]:
    """The engines that could run this model here, fastest first; the reference engine is not one to choose."""
    return tuple(
        name
        for name in preference()
        if backend(name).why_not() is None and any(manifest.find(kind, recipe) is not None for kind in backend(name).artifact_engines)
    )


def load(package: Package, *, engine: str, recipe: str | None, threads: int | None) -> tuple[Engine, str]:
    """The loaded engine and its backend's name."""
    name, artifact = choose(package.manifest, engine, recipe)
    folder = package.path / artifact.folder
    if not folder.is_dir():
        raise ArtifactError(f"{package.manifest.name}: folder {artifact.folder} is missing; convert or pull the model again")
    return backend(name).load(package.path, package.manifest, artifact, threads=threads), name
