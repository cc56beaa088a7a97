"""Hugging Face folders (config.json and safetensors, sharded or not) of the supported families as checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.core.decoder import DecoderConfig
from edgespec.core.errors import ArtifactError
from edgespec.core.scores import Float32
from edgespec_converters.checkpoint import StoredTensor, TokenizerFiles
from edgespec_converters.sources.content import load_json, map_bytes
from edgespec_converters.sources.hf_config import hf_config, refuse_code
from edgespec_converters.sources.inventory import check_tensors
from edgespec_converters.sources.safetensors_header import Entry, read_safetensors_header
from edgespec_converters.sources.settings import naming

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# gemma3 with pictures: the language model sits under one of these prefixes, beside parts that text does not need.
_LANGUAGE_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model."))
_VISION_PREFIXES = tuple(p + part for p in ("", "model.") for part in ("vision_tower.", "multi_modal_projector."))


class HfCheckpoint:
    """An opened folder. All headers are checked at once; tensor data is mapped per call and never kept.

    Raises ArtifactError for a folder that is damaged, hostile, or holds a model that edgespec does not support.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        values = load_json(folder / "config.json")
        _refuse_code(folder, values)
        entries = _language_model(_entries(folder), multimodal="text_config" in values)
        with naming(str(folder / "config.json")):
            self._config = hf_config(values, str(folder / "config.json"), entries)
        if self._config.tied:
            entries.pop("lm_head.weight", None)  # some folders store the tied head a second time
        check_tensors({name: entry.shape for name, entry in entries.items()}, self._config, str(folder))
        for name, entry in entries.items():
            if entry.dtype not in _DTYPES:
                raise ArtifactError(f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; supported: {', '.join(_DTYPES)}")
        self._entries = entries

    @property
    def name(self) -> str:
        return self._folder.resolve().name

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def tokenizer(self) -> TokenizerFiles:
        from edgespec_converters.sources.tokenizer_hf import hf_tokenizer

        return hf_tokenizer(self._folder)

    @property
    def license(self) -> str:
        return _license(self._folder / "README.md")

    @property
    def source(self) -> Mapping[str, Any]:
        files = sorted({entry.file for entry in self._entries.values()})
        return {"format": "safetensors", "files": [f.name for f in files], "nbytes": sum(f.stat().st_size for f in files)}

    def names(self) -> list[str]:
        return list(self._config.shapes())

    def tensor(self, name: str) -> Float32:
        return self._map(name).astype(np.float32)

    def stored(self, name: str) -> StoredTensor:
        entry = self._entries[name]
        return StoredTensor(kind=entry.dtype, shape=entry.shape, data=self._map(name))

    def _map(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        return map_bytes(entry.file, entry.offset, entry.nbytes).view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _refuse_code(folder: Path, config: Mapping[str, Any]) -> None:
    refuse_code(config, str(folder / "config.json"))
    for file in ("tokenizer_config.json", "generation_config.json"):
        if (folder / file).is_file():
            values = load_json(folder / file)
            values.pop("chat_template", None)  # prose, which may well mention a script.py
            refuse_code(values, str(folder / file))


def _entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of every weight file, by the name in the file."""
    if not (folder / _INDEX).is_file():
        return read_safetensors_header(_single_file(folder))
    headers: dict[str, dict[str, Entry]] = {}
    out: dict[str, Entry] = {}
    for name, file in _weight_map(folder).items():
        if file not in headers:
            headers[file] = read_safetensors_header(folder / file)
        if name not in headers[file]:
            raise ArtifactError(f"{folder / file} lacks tensor {name[:80]!r}, which {_INDEX} places there; download it again")
        out[name] = headers[file][name]
    return out


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name → file name. Raises ArtifactError for a name that could lead out of the folder."""
    mapping = load_json(folder / _INDEX).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ArtifactError(f"{folder / _INDEX} has no weight_map")
    files = cast(dict[str, Any], mapping)
    for file in files.values():
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\:\0"):
            raise ArtifactError(f"{folder / _INDEX} names the file {file!r}, which is no plain file name; refusing to read it")
        if not (folder / file).is_file():
            raise ArtifactError(f"{folder} lacks {file}, which {_INDEX} names; download it again")
    return cast(dict[str, str], files)


def _single_file(folder: Path) -> Path:
    if (folder / "model.safetensors").is_file():
        return folder / "model.safetensors"
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".safetensors" and p.is_file())
    if len(found) == 1:
        return found[0]
    if found:
        raise ArtifactError(f"{folder} has {len(found)} safetensors files but no {_INDEX}; download the folder again")
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _PICKLES)
    if pickles:
        raise ArtifactError(f"{folder} holds its weights only as {pickles[0]}, a pickle that could run code; get the safetensors version")
    raise ArtifactError(f"{folder} has a config.json but no safetensors file")


def _language_model(entries: dict[str, Entry], *, multimodal: bool) -> dict[str, Entry]:
    """The tensors that text needs, under the names of a text-only model."""
    out: dict[str, Entry] = {}
    for name, entry in entries.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old folders store what the config implies
        if multimodal and name.startswith(_VISION_PREFIXES):
            continue
        if multimodal:
            name = next((new + name.removeprefix(old) for old, new in _LANGUAGE_PREFIXES if name.startswith(old)), name)
        if name in out:
            raise ArtifactError(f"{entry.file} holds tensor {name!r} twice")
        out[name] = entry
    return out


def _license(readme: Path) -> str:
    """The `license:` line of a model card's front matter."""
    if not readme.is_file():
        return ""
    with readme.open(encoding="utf-8", errors="replace") as file:
        if file.readline(16).strip() != "---":
            return ""
        for _ in range(200):
            line = file.readline(4096)
            if not line or line.strip() == "---":
                break
            if line.startswith("license:"):
                return line.removeprefix("license:").strip().strip("\"'")
    return ""
