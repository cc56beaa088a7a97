"""Damaged files must be refused by name and before anything they claim is believed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import open_checkpoint


def assert_refused_cheaply(source: Path, damaged: Path, message: str, *, most_bytes: int) -> None:
    """Opening `source` is an ArtifactError that names the file `damaged`, and at its peak takes less than `most_bytes`."""
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=message) as error:
            open_checkpoint(source)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < most_bytes
    assert str(damaged) in str(error.value)
