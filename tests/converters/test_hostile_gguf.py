"""Crafted, damaged and unsupported GGUF files: refused by name, cheaply, before anything believes them (ESB-55)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.decoder import FAMILIES, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import open_checkpoint
from edgespec_converters.sources.gguf_config import gguf_config
from edgespec_converters.sources.gguf_header import read_header
from tests.helpers.refusals import assert_refused_cheaply
from tests.helpers.tiny import gguf_name, gguf_settings, tiny_config, tiny_tensors, write_gguf

U32, I32, F32, STRING, ARRAY, U64 = 4, 5, 6, 8, 9, 10
HUGE = 2**63


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    rank = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def file(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int | None = None) -> bytes:
    """A header of these parts, then `data` bytes of tensor data; None: zeros up to 200 bytes."""
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    if data is None:
        return head.ljust(200, b"\0")
    return head + bytes(-len(head) % 32 + data)


ALIGNMENT = "general.alignment"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "dims whose 64-bit product wraps to 0": (file(info("a", [2**32, 2**32]), tensors=1), "are missing"),
    "dims whose product wraps to 4": (file(info("a", [2**62 + 1, 4]), tensors=1), "are missing"),
    "a million dimensions": (file(info("a", [1], n_dims=10**6), tensors=1), "1000000 dimensions"),
    "no dimensions": (file(info("a", []), tensors=1), "0 dimensions"),
    "a dimension of 0": (file(info("a", [0, 4]), tensors=1), r"shape \[0, 4\]"),
    "a row of half a block": (file(info("a", [33, 4], kind=8), tensors=1), "whole blocks of 32"),
    "key of 2^63 bytes": (file(text("", HUGE), keys=1), "bytes are missing"),
    "value of 2^63 bytes": (file(key("k", STRING, text("", HUGE)), keys=1), "bytes are missing"),
    "tensor name of 2^64 - 1 bytes": (file(text("", 2**64 - 1), tensors=1), "bytes are missing"),
    "10^12 keys": (file(keys=10**12), "1000000000000 keys"),
    "10^12 tensors": (file(tensors=10**12), "1000000000000 tensors"),
    "2^64 - 1 keys": (file(keys=2**64 - 1), "only 176 bytes follow"),
    "alignment 0": (file(key(ALIGNMENT, U32, struct.pack("<I", 0)), keys=1), "general.alignment is 0"),
    "alignment 2^30": (file(key(ALIGNMENT, U32, struct.pack("<I", 2**30)), keys=1), "general.alignment is 1073741824"),
    "alignment 24": (file(key(ALIGNMENT, U32, struct.pack("<I", 24)), keys=1), "general.alignment is 24"),
    "alignment of the wrong type": (file(key(ALIGNMENT, F32, struct.pack("<f", 32)), keys=1), "general.alignment is 32.0"),
    "arrays in arrays, 1000 deep": (file(key("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000), keys=1, data=0), "nests arrays"),
    "array of 2^62 strings": (file(key("k", ARRAY, struct.pack("<IQ", STRING, 2**62)), keys=1), "bytes are missing"),
    "array of 2^62 integers": (file(key("k", ARRAY, struct.pack("<IQ", U64, 2**62)), keys=1), "bytes are missing"),
    "array of an unknown type": (file(key("k", ARRAY, struct.pack("<IQ", 77, 1)), keys=1), "unknown type 77"),
    "unknown value type": (file(key("k", 13, b""), keys=1), "unknown value type 13"),
    "unknown tensor type": (file(info("a", [4], kind=4000), tensors=1), "unknown type 4000"),
    "offset outside the file": (file(info("a", [4], offset=1 << 40), tensors=1, data=64), "bytes are missing"),
    "offset that wraps": (file(info("a", [4], offset=2**64 - 32), tensors=1, data=64), "bytes are missing"),
    "offset off its alignment": (file(info("a", [4], offset=8), tensors=1, data=64), "not aligned to 32"),
    "overlapping tensors": (file(info("a", [16]), info("b", [8], offset=32), tensors=2, data=128), "overlap"),
    "one tensor name twice": (file(info("a", [8]), info("a", [8], offset=32), tensors=2, data=64), "tensor 'a' appears twice"),
    "one key twice": (file(*[key("k", U32, bytes(4))] * 2, keys=2), "key 'k' appears twice"),
    "name that is not UTF-8": (file(key("", U32, bytes(4)), text(b"\xff\xfe"), keys=1, tensors=1), "is not UTF-8"),
    "version 1": (file(version=1), "version 1"),
    "version 4": (file(version=4), "version 4"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "only the magic": (b"GGUF", "only 4 bytes"),
    "more layers than tensors": (
        file(
            key("general.architecture", STRING, text("llama")),
            *(key(f"llama.{k}", U32, struct.pack("<I", 4)) for k in ("embedding_length", "attention.head_count", "feed_forward_length")),
            key("llama.block_count", U32, struct.pack("<I", 2**31 - 1)),
            key("llama.context_length", U32, struct.pack("<I", 4)),
            info("token_embd.weight", [4, 1]),
            tensors=1,
            keys=6,
            data=16,
        ),
        "claims 2147483647 layers",
    ),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", HOSTILE)
def test_esb_55_hostile_header(case: str, tmp_path: Path) -> None:
    """Refused at once and without memory: a loop or an allocation by a claimed count would run into the limits."""
    data, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    assert_refused_cheaply(path, path, message, most_bytes=1 << 20)


def test_a_whole_header_is_read(tmp_path: Path) -> None:
    """The builder of the cases above builds valid files too; arrays, alignment and every scalar type come back as plain values."""
    scalars: list[tuple[int, str, Any]] = [(0, "B", 200), (1, "b", -3), (2, "H", 5), (3, "h", -5), (4, "I", 7), (5, "i", -7)]
    scalars += [(6, "f", 0.5), (7, "?", True), (10, "Q", 2**63), (11, "q", -9), (12, "d", 0.1)]
    keys = [key(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, code, value in scalars]
    keys += [key("array", ARRAY, struct.pack("<IQ3i", I32, 3, 1, -2, 3)), key(ALIGNMENT, U32, struct.pack("<I", 64))]
    keys += [key("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("é") + text(""))]
    head = b"".join([*keys, info("a", [4, 2]), info("b", [32], kind=8, offset=64)])
    data = file(head, tensors=2, keys=len(keys), data=0)
    start = -(-(24 + len(head)) // 64) * 64
    path = tmp_path / "whole.gguf"
    path.write_bytes(data.ljust(start + 64 + 34, b"\0"))
    header = read_header(path)
    assert header.fields == {f"k{kind}": value for kind, _, value in scalars} | {"array": [1, -2, 3], ALIGNMENT: 64, "words": ["é", ""]}
    assert (header.tensors["a"].shape, header.tensors["a"].offset, header.tensors["a"].nbytes) == ((2, 4), start, 32)
    assert (header.tensors["b"].kind, header.tensors["b"].offset, header.tensors["b"].nbytes) == (
        gguf.GGMLQuantizationType.Q8_0,
        start + 64,
        34,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny_config("qwen2", layers=1)
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", config, tiny_tensors(config), kind="Q8_0").read_bytes()


def test_truncated_file_names_itself_and_what_is_missing(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-1000])
    end = max(t.offset + t.nbytes for t in _header_of(whole, tmp_path).values())
    with pytest.raises(ArtifactError, match=f"{end - len(whole) + 1000} bytes are missing") as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)
    for length in range(25, 6000, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"bytes are missing|bytes follow"):
            open_checkpoint(path)


def _header_of(data: bytes, folder: Path) -> dict[str, Any]:
    (folder / "whole.gguf").write_bytes(data)
    return read_header(folder / "whole.gguf").tensors


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_header_is_an_artifact_error_or_a_model(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(whole) - 8, 12000)))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([b"\xff" * 8, bytes(8), struct.pack("<Q", HUGE)])))
        damaged[at : at + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
    except ArtifactError:
        return
    assert checkpoint.tensor("model.norm.weight").shape == (checkpoint.config.hidden,)


# -- whole files that hold something else --------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, r"llama\.expert_count = 8 is not supported"),
    "soft capping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "logit scale": ({"logit_scale": 2.0}, "logit_scale"),
    "longrope": ({"rope.scaling.type": "longrope"}, "supported: none, linear, yarn"),
    "partial rotation": ({"rope.dimension_count": 4}, "rope.dimension_count"),
    "values of another width": ({"attention.value_length": 4}, "value_length"),
    "a window outside gemma3": ({"attention.sliding_window": 16}, "sliding_window"),
    "kv heads that differ by layer": ({"attention.head_count_kv": [2, 4, 2]}, "head_count_kv must be an integer"),
    "an encoder": ({"attention.causal": False}, "only decoders"),
    "a text for a number": ({"block_count": "three"}, "block_count must be an integer"),
    "wrong kv heads": (
        {"attention.head_count_kv": 4},
        r"6 of another shape \(model\.layers\.0\.self_attn\.k_proj\.weight \[16, 64\] instead of",
    ),
    "a missing layer": ({"block_count": 4}, r"9 missing \(model\.layers\.3\."),
    "a layer too many": ({"block_count": 2}, r"9 unknown \(model\.layers\.2\."),
    "no layers": ({"block_count": 0}, "layers must be a positive integer"),
    "no heads": ({"attention.head_count": 0}, "must be a positive integer"),
    "an infinite frequency": ({"rope.freq_base": float("inf")}, "must be a finite number"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_models_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = UNSUPPORTED[case]
    config = tiny_config("llama")
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), settings=changes)
    with pytest.raises(ArtifactError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_switched_off_features_are_accepted(tmp_path: Path) -> None:
    config = tiny_config("llama", layers=1)
    off = {"expert_count": 0, "final_logit_softcapping": 0.0, "rope.scaling.type": "none", "attention.head_count_kv": [2, 2]}
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), settings=off)).config == config


def _set_architecture(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["general.architecture"] = gguf.GGUFValue("mamba", gguf.GGUFValueType.STRING)


def _split(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def _adapter(writer: gguf.GGUFWriter) -> None:
    writer.add_string("general.type", "adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set_architecture, "architecture 'mamba' is not supported; supported: llama, qwen2, qwen3, gemma3"),
        (_split, "split over several files"),
        (_adapter, "hold no whole model"),
    ],
)
def test_other_kinds_of_files(change: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    change(writer)
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_type_that_cannot_be_dequantised(tmp_path: Path) -> None:
    config = tiny_config("llama", layers=1)
    tensors = tiny_tensors(config)
    tensors.pop("lm_head.weight")
    extra = {"output.weight": (np.zeros((320, 64), np.int8), "I8")}
    path = write_gguf(tmp_path / "m.gguf", config, tensors, extra=extra)
    with pytest.raises(ArtifactError, match=r"'output\.weight' is stored as I8"):
        open_checkpoint(path)


ODD = [True, -1, 0, 3, 2**63, 0.5, float("inf"), float("nan"), 1e300, "x", "yarn", [], [1], [1, "a"], [True] * 7]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_odd_settings_are_an_artifact_error_or_a_config(data: st.DataObject) -> None:
    """Any value at any key: nothing but ArtifactError comes out."""
    config = tiny_config(data.draw(st.sampled_from(FAMILIES)), rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_context=64))
    fields = {f"{config.family}.{k}": v for k, v in gguf_settings(config).items()} | {"general.architecture": config.family}
    optional = ("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.attn_factor", "rope.scale_linear", "vocab_size")
    keys = sorted({*fields, *(f"{config.family}.{k}" for k in optional)})
    for name in data.draw(st.lists(st.sampled_from(keys), max_size=3)):
        fields[name] = data.draw(st.sampled_from(ODD))
    shapes = {gguf_name(config, name): shape for name, shape in config.shapes().items()}
    factors = data.draw(st.sampled_from([None, np.ones(4, np.float32), np.array([1, 2, np.nan, np.inf], np.float32)]))
    with contextlib.suppress(ArtifactError):
        gguf_config(fields, shapes, "m.gguf", factors)
