"""Crafted, damaged and unsupported Hugging Face folders: refused by name, nothing executed (ESB-29, ESB-57, ESB-59)."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from edgespec.core.decoder import FAMILIES, Family, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import open_checkpoint
from edgespec_converters.sources.hf_config import hf_config as read_config
from edgespec_converters.sources.safetensors_header import read_safetensors_header
from tests.helpers.refusals import assert_refused_cheaply
from tests.helpers.tiny import hf_config, tiny_config, tiny_tensors, write_gguf, write_hf

CONFIG = tiny_config("llama", layers=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", CONFIG, tiny_tensors(CONFIG))


def configure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(hf_config(CONFIG) | changes))


# -- safetensors (ESB-29) ------------------------------------------------------------------------------------------------


def file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "shorter than its header says": (file({"a": entry()}, bytes(2)), "6 bytes are missing"),
    "offsets past the end": (file({"a": entry(offsets=(2**40, 2**40 + 8))}, bytes(8)), "bytes are missing"),
    "overlapping": (file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "'a' and 'b' overlap"),
    "shape and length disagree": (file({"a": entry(shape=(3,))}, bytes(8)), "needs 12 bytes, its data_offsets hold 8"),
    "shape whose product wraps": (file({"a": entry(shape=(2**32, 2**32))}, bytes(8)), "needs 73786976294838206464 bytes"),
    "header of 2^63 bytes": (file({}, length=2**63), "claims 9223372036854775808 bytes"),
    "header longer than the file": (file({"a": entry()}, length=1000), "bytes are missing"),
    "offsets backwards": (file({"a": entry(offsets=(8, 0))}, bytes(8)), "no valid data_offsets"),
    "negative offset": (file({"a": entry(offsets=(-8, 0))}, bytes(8)), "no valid data_offsets"),
    "negative dimension": (file({"a": entry(shape=(-2,))}, bytes(8)), "no valid shape"),
    "truth as a dimension": (file({"a": entry(shape=(True, 2))}, bytes(8)), "no valid shape"),
    "fractional dimension": (file({"a": entry(shape=(2.0,))}, bytes(8)), "no valid shape"),
    "a thousand dimensions": (file({"a": entry(shape=[1] * 1000)}, bytes(8)), "no valid shape"),
    "unknown dtype": (file({"a": entry(dtype="F33")}, bytes(8)), "unknown dtype 'F33'"),
    "dtype that is no text": (file({"a": entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
    "entry that is no object": (file({"a": 3}), "unknown dtype"),
    "one name twice": (file(b'{"a": {}, "a": {}}'), "key 'a' appears twice"),
    "deeply nested": (file(b'{"a":' + b"[" * 100_000), "nests JSON too deeply"),
    "no JSON": (file(b'{"a" 3}'), "is not valid JSON"),
    "not UTF-8": (file(b'{"\xff": 3}'), "is not valid JSON"),
    "a list": (file(b"[1]"), "not safetensors"),
    "empty": (b"", "is an empty file, not safetensors"),
    "five bytes": (b"\1\2\3\4\5", "not safetensors"),
    "HTML": (b"<!DOCTYPE html><html>sign in</html>", "an HTML page"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", DAMAGED)
def test_esb_29_damaged_safetensors(case: str, folder: Path) -> None:
    data, message = DAMAGED[case]
    path = folder / "model.safetensors"
    path.write_bytes(data)
    assert_refused_cheaply(folder, path, message, most_bytes=8 << 20)


def test_esb_29_truncated_shard_names_itself(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIG, tiny_tensors(CONFIG), shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"model-00002-of-00002\.safetensors is truncated: .* 100 bytes are missing"):
        open_checkpoint(tmp_path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_safetensors_header_is_an_artifact_error_or_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, path)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        entries = read_safetensors_header(path)
    except ArtifactError:
        return
    assert all(e.offset + e.nbytes <= len(damaged) for e in entries.values())


def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    """0x80 0x02 begins a pickle, and also a safetensors header of 0x280 bytes."""
    header = json.dumps({"a": entry()}).encode().ljust(0x280)
    (tmp_path / "m.safetensors").write_bytes(file(header, bytes(8)))
    assert list(read_safetensors_header(tmp_path / "m.safetensors")) == ["a"]


# -- index ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "c:x", "a\\b", "a\0b", 7, None]
)
def test_index_cannot_leave_the_folder(name: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    weight_map = dict.fromkeys(CONFIG.shapes(), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ArtifactError, match="no plain file name; refusing to read it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, r"lacks gone\.safetensors"),
        ({"weight_map": {"no.such": "model.safetensors"}}, "lacks tensor 'no.such'"),
        ({"weight_map": {}}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "expected an object"),
    ],
)
def test_broken_index(index: object, message: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(folder)


# -- code (ESB-57) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}},
        {"model_file": "evil"},
        {"trust_remote_code": True},
        {"custom": {"deep": ["evil.py"]}},
        {"loader": "../evil.py"},
        {"loader": "/tmp/evil.py::Evil"},
        {"loader": "evil.pyc"},
    ],
)
def test_esb_57_config_cannot_name_code(changes: dict[str, Any], folder: Path) -> None:
    touched = folder.parent / "touched"
    code = f"open({str(touched)!r}, 'w')"
    for name in ("evil.py", "modeling_evil.py", "evil", "__init__.py"):
        (folder / name).write_text(code)
    (folder.parent / "evil.py").write_text(code)
    configure(folder, **changes)
    with pytest.raises(ArtifactError, match="never runs code from a model"):
        open_checkpoint(folder)
    assert not touched.exists()


def test_esb_57_tokenizer_config_cannot_name_code(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json asks to run code"):
        open_checkpoint(folder)
    path.write_text(json.dumps({"chat_template": "Run it as script.py"}))
    assert open_checkpoint(folder).config == CONFIG


# -- pickles (ESB-59) ----------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "MODEL.BIN", "model.SafeTensors", "model.safetensors"])
def test_esb_59_pickles_are_never_loaded(name: str, protocol: int, folder: Path) -> None:
    touched = folder.parent / "touched"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(str(touched)), protocol))
    with pytest.raises(ArtifactError, match="pickle"):
        open_checkpoint(folder)
    with pytest.raises(ArtifactError, match="is a Python pickle; give a GGUF file"):
        open_checkpoint(folder / name)
    assert not touched.exists()


def test_a_safetensors_file_by_another_name_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "Weights.SafeTensors")
    assert open_checkpoint(folder).config == CONFIG
    (folder / "more.safetensors").write_bytes((folder / "Weights.SafeTensors").read_bytes())
    with pytest.raises(ArtifactError, match="2 safetensors files but no model"):
        open_checkpoint(folder)


# -- unsupported models --------------------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen2, qwen3, gemma3"),
    "no architecture": ({"model_type": None}, "model_type"),
    "recurrent layers": ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    "windows where none belong": ({"layer_types": ["sliding_attention"]}, "layer_types"),
    "experts": ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "bias everywhere": ({"attention_bias": True}, "attention_bias"),
    "bias in the MLP": ({"mlp_bias": True}, "mlp_bias"),
    "another activation": ({"hidden_act": "relu"}, "llama models use silu"),
    "soft capping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "longrope": ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "supported rope scalings: linear, llama3, yarn"),
    "long and short factors": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "short_factor": [1]}}, "short_factor"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
    "a negative factor": ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "must be a positive number"),
    "scaling that is no object": ({"rope_scaling": [2.0]}, "rope_scaling must be an object"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "cannot share 3 kv heads"),
    "more layers than tensors": ({"num_hidden_layers": 2**31 - 1}, "claims 2147483647 layers"),
    "a text for a number": ({"hidden_size": "64"}, "hidden_size must be an integer, found '64'"),
    "no hidden size": ({"hidden_size": None}, "hidden_size is missing"),
    "an endless number": ({"rope_theta": float("inf")}, "rope_theta must be a finite number"),
    "another shape": (
        {"intermediate_size": 64},
        r"3 of another shape \(model\.layers\.0\.mlp\.gate_proj\.weight \[96, 64\] instead of \[64, 64\]",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_models_are_refused_by_name(case: str, folder: Path) -> None:
    changes, message = UNSUPPORTED[case]
    configure(folder, **changes)
    with pytest.raises(ArtifactError, match=message) as error:
        open_checkpoint(folder)
    assert str(folder) in str(error.value)


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG)
    del tensors["model.norm.weight"]
    tensors |= {f"adapter.{i}": np.ones(2, np.float32) for i in range(6)}
    write_hf(tmp_path, CONFIG, tensors)
    with pytest.raises(ArtifactError, match=r"1 missing \(model\.norm\.weight\); 6 unknown \(adapter\.0, .* and 2 more\)"):
        open_checkpoint(tmp_path)


def test_numbers_in_other_formats_are_refused(folder: Path) -> None:
    stored = {name: t.astype(np.float64) for name, t in tiny_tensors(CONFIG).items()}
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match="is stored as F64; supported: F32, F16, BF16"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\xff"])
def test_broken_config(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ArtifactError, match=r"config\.json"):
        open_checkpoint(folder)


# -- what is it? ---------------------------------------------------------------------------------------------------------


def test_sources_are_told_apart_by_content(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    disguised = write_gguf(tmp_path / "gguf" / "model.safetensors", CONFIG, tiny_tensors(CONFIG))
    assert open_checkpoint(disguised).source["format"] == "gguf"
    assert open_checkpoint(disguised.parent).source["format"] == "gguf"
    assert open_checkpoint(folder).source["format"] == "safetensors"
    with pytest.raises(ArtifactError, match="is a safetensors file; give a GGUF file, or a folder"):
        open_checkpoint(folder / "model.safetensors")
    (disguised.parent / "two.gguf").write_bytes(disguised.read_bytes())
    with pytest.raises(ArtifactError, match=r"holds 2 GGUF files \(model\.safetensors, two\.gguf\)"):
        open_checkpoint(disguised.parent)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        open_checkpoint(tmp_path / "gone")
    with pytest.raises(ArtifactError, match=r"neither a config\.json nor a GGUF file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
    with pytest.raises(ArtifactError, match="no safetensors file"):
        open_checkpoint(tmp_path)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ArtifactError, match=r"config\.json cannot be read: Permission denied"):
        open_checkpoint(folder)


@pytest.mark.parametrize("as_gguf", [True, False])
def test_a_file_that_shrinks_after_it_was_opened(as_gguf: bool, folder: Path) -> None:
    path = write_gguf(folder / "m.gguf", CONFIG, tiny_tensors(CONFIG)) if as_gguf else folder / "model.safetensors"
    checkpoint = open_checkpoint(path if as_gguf else folder)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ArtifactError, match="vanished or shrank"):
        checkpoint.tensor("model.norm.weight")


ODD = [None, True, -1, 0, 3, 2**70, 0.5, float("inf"), float("nan"), "x", [], [1], [None], {}, {"a": 1}, {"rope_type": "yarn"}]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_odd_settings_are_an_artifact_error_or_a_config(data: st.DataObject) -> None:
    """Whatever a config.json says, in the order of every family: nothing but ArtifactError comes out."""
    config = tiny_config(data.draw(st.sampled_from(FAMILIES)), rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_context=64))
    values = hf_config(config) | {"text_config": None, "rope_parameters": None, "sliding_window_pattern": 6}
    for target in (values, values["rope_scaling"]):
        for key in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=2)):
            target[key] = data.draw(st.sampled_from(ODD))
    with contextlib.suppress(ArtifactError):
        read_config(values, "config.json", config.shapes())


@pytest.mark.parametrize("size", [-1, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_width_that_is_none_is_refused_in_every_family(family: Family, size: int) -> None:
    config = tiny_config(family)
    with pytest.raises(ArtifactError, match="hidden"):
        read_config(hf_config(config) | {"hidden_size": size}, "config.json", config.shapes())
