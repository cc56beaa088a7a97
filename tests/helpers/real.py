"""Real models from the store. A model that is not there is a visible skip, never a silent pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from edgespec.core.errors import ArtifactError
from edgespec.orchestrator.runtime import Runtime, load
from edgespec.orchestrator.store import find_package

PROMPTS = tuple((Path(__file__).parent.parent / "data" / "prompts.txt").read_text(encoding="utf-8").splitlines())


def need(name: str) -> None:
    """Skip the test unless this package is installed."""
    try:
        find_package(name.partition("@")[0])
    except ArtifactError:
        pytest.skip(f"{name} is not in the store; run: edgespec pull {name}")


@cache
def loaded(name: str, *, engine: str = "onnx", draft: str = "ngram") -> Runtime:
    """One runtime per model, engine and draft, shared by the tests of a process."""
    need(name)
    return load(name, engine=engine, draft=draft)
