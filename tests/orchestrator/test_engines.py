"""What is said when no engine can run a package."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.mlx import MlxBackend
from edgespec.core.errors import CapabilityError
from edgespec.orchestrator.engines import choose
from tests.helpers.stored import write_package


def refusal(package: Path, engine: str, recipe: str | None = None, engines: tuple[str, ...] = ("onnx",)) -> str:
    with pytest.raises(CapabilityError) as caught:
        choose(write_package(package, "m", engines=engines), engine, recipe)
    return str(caught.value)


def test_a_missing_artifact_can_be_added(tmp_path: Path) -> None:
    text = refusal(tmp_path, "reference")
    assert text == "m cannot run on reference: reference: no mlx artifact (it has onnx/int8). To add one: edgespec convert m --targets mlx"


def test_a_missing_library_is_not_mended_by_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlxBackend, "why_not", lambda self: "MLX is not here; run: pip install mlx")
    text = refusal(tmp_path, "mlx", engines=("onnx", "mlx"))
    assert text.endswith("run: pip install mlx")


@pytest.mark.parametrize("engine", ["auto", "onnx", "mlx"])
def test_an_unknown_recipe_says_which_there_are(tmp_path: Path, engine: str) -> None:
    assert refusal(tmp_path, engine, "foo").startswith("m has no recipe 'foo'; it has int8 (")
