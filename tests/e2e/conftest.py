"""Tiny models of every family, written as files and converted by the command, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.decoder import FAMILIES, DecoderConfig, Family
from tests.helpers.command import Result, edgespec
from tests.helpers.tiny import tiny_config, tiny_tensors, write_gguf, write_hf

RECIPES = ("float32", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Street:
    """A store with a package per family, of every recipe for every engine; `{family}-gguf` came from a GGUF file (float32)."""

    home: Path
    sources: dict[str, Path]  # by package name
    configs: dict[Family, DecoderConfig]
    tensors: dict[Family, dict[str, np.ndarray]]
    conversions: dict[tuple[str, str], Result]  # by package name and recipe

    @property
    def run(self) -> Callable[..., Result]:
        return partial(edgespec, home=self.home)


@pytest.fixture(scope="session")
def street(tmp_path_factory: pytest.TempPathFactory) -> Street:
    root = tmp_path_factory.mktemp("street")
    # Wide enough that 4 bits leave the argmax where it was more often than the recipe's gate demands.
    configs = {family: tiny_config(family, hidden=128, head_dim=16, ffn=192) for family in FAMILIES}
    made = Street(home=root / "home", sources={}, configs=configs, tensors={f: tiny_tensors(c) for f, c in configs.items()}, conversions={})
    for family, config in configs.items():
        made.sources[family] = write_hf(root / family, config, made.tensors[family])
        made.sources[f"{family}-gguf"] = write_gguf(root / f"{family}-gguf.gguf", config, made.tensors[family])
        for name, recipe in [*((family, recipe) for recipe in RECIPES), (f"{family}-gguf", "float32")]:
            arguments = ("convert", str(made.sources[name]), "--name", name, "--recipe", recipe, "--targets", "onnx,mlx")
            made.conversions[name, recipe] = made.run(*arguments)
    return made
