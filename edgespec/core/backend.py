from __future__ import annotations

from pathlib import Path
from typing import Protocol

from edgespec.core.engine import Engine
from edgespec.core.manifest import Artifact, Manifest


class Backend(Protocol):
    """A device library, imported on first use. Each module of `edgespec.backends` offers one as `BACKEND`."""

    @property
    def name(self) -> str: ...

    @property
    def artifact_engines(self) -> tuple[str, ...]:
        """Which artifacts it loads (`Artifact.engine`), best first."""
        ...

    def why_not(self) -> str | None:
        """None if this backend works here, else the reason in one line."""
        ...

    def describe(self) -> str:
        """One line for `doctor`: library version and the unit that would run."""
        ...

    def load(self, package: Path, manifest: Manifest, artifact: Artifact, *, threads: int | None = None) -> Engine:
        """Raises ArtifactError for damaged files, CapabilityError if the backend does not work here, DeviceError from the library."""
        ...
