"""TOML that somebody may have damaged."""

from __future__ import annotations

import tomllib
from typing import Any

from edgespec.core.errors import ArtifactError


def read(text: str, *, origin: str) -> dict[str, Any]:
    """ArtifactError says what is wrong with it; beside its own error the parser lets those of numbers and of nesting through."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{origin} is not valid TOML: {error}") from error
