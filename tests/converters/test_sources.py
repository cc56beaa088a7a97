"""Every family comes back from both formats as it went in: configuration, tensors, stored formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from edgespec.core.decoder import FAMILIES, DecoderConfig, Family, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import Checkpoint, open_checkpoint
from edgespec_converters.sources import gguf as gguf_source
from tests.helpers.tiny import (
    CHAT_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    tiny_config,
    tiny_tensors,
    tiny_tokenizer,
    to_gguf_values,
    write_gguf,
    write_hf,
)

SCALINGS = [
    RopeScaling(kind="linear", factor=4.0),
    RopeScaling(kind="yarn", factor=4.0, original_context=64, beta_fast=16.0),
    RopeScaling(kind="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
]
QUANTISABLE = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def assert_same_config(found: DecoderConfig, expected: DecoderConfig) -> None:
    """Equal, with the default attention scale spelled out on both sides."""
    assert replace(found, attention_scale=found.scale) == replace(expected, attention_scale=expected.scale)


def assert_same_tensors(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert checkpoint.names() == list(expected)
    for name, values in expected.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_gguf_round_trip(family: Family, kind: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model", config, tensors, kind=kind))
    assert_same_config(checkpoint.config, config)
    assert_same_tensors(checkpoint, tensors)
    assert checkpoint.license == "apache-2.0"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "shards"), [("F32", 1), ("BF16", 3), ("F16", 2)])
def test_hf_round_trip(family: Family, dtype: str, shards: int, tmp_path: Path) -> None:
    config = tiny_config(family)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_hf(tmp_path, config, tensors, dtype=dtype, shards=shards))
    assert_same_config(checkpoint.config, config)
    expected = tensors if dtype != "F16" else {n: t.astype(np.float16).astype(np.float32) for n, t in tensors.items()}
    assert_same_tensors(checkpoint, expected)
    assert checkpoint.stored("model.norm.weight").kind == dtype


def test_esb_40_gguf_row_order_uses_each_head_count(tmp_path: Path) -> None:
    """8 heads, 2 kv heads: with one head count for both, q or k would come back shuffled, and as fluent nonsense."""
    config = tiny_config("llama", heads=8, kv_heads=2, head_dim=8)
    rows_q = np.repeat(np.arange(64.0, dtype=np.float32)[:, None], 64, axis=1)
    tensors = tiny_tensors(config) | {
        "model.layers.0.self_attn.q_proj.weight": rows_q,
        "model.layers.0.self_attn.k_proj.weight": rows_q[:16],
    }
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    stored = gguf.GGUFReader(path)
    pairs = next(t for t in stored.tensors if t.name == "blk.0.attn_k.weight").data[:, 0]
    assert pairs[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]  # the file does hold pairs
    del stored, pairs
    assert_same_tensors(open_checkpoint(path), tensors)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", QUANTISABLE)
def test_stored_blocks_dequantise_to_the_tensor(family: Family, kind: str, tmp_path: Path) -> None:
    """Blocks arrive in Hugging Face row order, so an exact mapping of them needs no further knowledge."""
    config = tiny_config(family)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, kind=kind))
    quantisation = gguf.GGMLQuantizationType[kind]
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        assert stored.shape == tensors[name].shape
        if stored.kind in ("F32", "F16", "BF16"):
            values = stored.data.astype(np.float32)
        else:
            assert stored.data.dtype == np.uint8
            assert len(stored.data) == stored.shape[0]
            values = gguf.quants.dequantize(stored.data, quantisation)
        np.testing.assert_array_equal(values, checkpoint.tensor(name), err_msg=name)
        if len(stored.shape) == 2:
            assert stored.kind == kind
            once = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], quantisation), quantisation)
            np.testing.assert_array_equal(values, once, err_msg=name)


@pytest.mark.parametrize(
    "kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "IQ2_XXS", "IQ3_S", "IQ1_M", "TQ1_0", "MXFP4"]
)
def test_formats_that_only_llama_cpp_writes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arbitrary blocks, rows permuted as llama's are: equal to dequantising all at once, although done a few rows at a time."""
    monkeypatch.setattr(gguf_source, "_CHUNK_ELEMENTS", 3 * 256)
    config = tiny_config("llama", hidden=256, head_dim=32, layers=1)
    quantisation = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = np.random.default_rng(0).integers(0, 60, (64, 256 // block * block_bytes), dtype=np.uint8)  # finite as float16
    tensors = tiny_tensors(config)
    name = "model.layers.0.self_attn.k_proj.weight"
    del tensors[name]
    extra = {"blk.0.attn_k.weight": (to_gguf_values(config, name, blocks), kind)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, extra=extra))
    np.testing.assert_array_equal(checkpoint.stored(name).data, blocks)
    np.testing.assert_array_equal(checkpoint.tensor(name), gguf.quants.dequantize(blocks, quantisation))


def test_dequantising_holds_few_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama", layers=1)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), kind="Q8_0"))
    monkeypatch.setattr(gguf_source, "_CHUNK_ELEMENTS", 10 * 64)
    rows: list[int] = []
    dequantize = gguf.quants.dequantize

    def counted(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        rows.append(len(data))
        return dequantize(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    checkpoint.tensor("model.embed_tokens.weight")
    assert rows == [10] * 32


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind)
@pytest.mark.parametrize("as_gguf", [True, False])
def test_rope_scaling_survives(scaling: RopeScaling, as_gguf: bool, tmp_path: Path) -> None:
    config = tiny_config("llama", rope_scaling=scaling, head_dim=64, rope_theta=5e5)
    tensors = tiny_tensors(config)
    source = write_gguf(tmp_path / "model.gguf", config, tensors) if as_gguf else write_hf(tmp_path, config, tensors)
    found = open_checkpoint(source).config
    np.testing.assert_allclose(found.rope(0)[0], config.rope(0)[0], rtol=1e-4)
    assert found.rope(0)[1] == pytest.approx(config.rope(0)[1])
    assert found.rope_scaling is not None and found.rope_scaling.kind == scaling.kind


def test_llama3_scaling_is_recovered_from_unusual_parameters(tmp_path: Path) -> None:
    """A GGUF file keeps only the resulting frequencies."""
    scaling = RopeScaling(kind="llama3", factor=16.0, original_context=3000, low_freq_factor=2.0, high_freq_factor=9.0)
    config = tiny_config("llama", rope_scaling=scaling, head_dim=128, rope_theta=5e5)
    found = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config))).config
    np.testing.assert_allclose(found.rope(0)[0], config.rope(0)[0], rtol=1e-4)


def test_rope_factors_of_no_known_rule_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama", layers=1)
    factors = np.array([1, 7, 2, 5], np.float32)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config), extra={"rope_freqs.weight": (factors, "F32")})
    with pytest.raises(ArtifactError, match=r"rope_freqs\.weight follow no supported rule"):
        open_checkpoint(path)


def test_gemma3_scales_only_global_layers(tmp_path: Path) -> None:
    config = tiny_config("gemma3", rope_scaling=RopeScaling(kind="linear", factor=8.0))
    for source in (write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)), write_hf(tmp_path / "hf", config, tiny_tensors(config))):
        found = open_checkpoint(source).config
        assert_same_config(found, config)
        assert [found.window(layer) for layer in range(7)] == [8] * 5 + [None, 8]
        assert found.rope(5)[0][1] == pytest.approx(1e6 ** (-2 / 16) / 8)
        assert found.rope(0)[0][1] == pytest.approx(1e4 ** (-2 / 16))


# -- tied heads (ESB-41) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "flag", "with_head", "tied"),
    [
        ("llama", None, True, False),
        ("llama", None, False, True),
        ("llama", True, True, True),
        ("qwen2", False, True, False),
        ("gemma3", None, False, True),
        ("gemma3", None, True, True),
    ],
)
def test_esb_41_tied_heads(family: Family, flag: bool | None, with_head: bool, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(family, tied=not with_head, layers=1)
    write_hf(tmp_path, config, tiny_tensors(config), settings={"tie_word_embeddings": flag})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tied is tied
    assert ("lm_head.weight" in checkpoint.names()) is not tied


def test_esb_41_an_untied_head_must_be_there(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=True, layers=1)
    write_hf(tmp_path, config, tiny_tensors(config), settings={"tie_word_embeddings": False})
    with pytest.raises(ArtifactError, match=r"1 missing \(lm_head\.weight\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_esb_41_tied_gguf(tied: bool, tmp_path: Path) -> None:
    config = tiny_config("qwen2", tied=tied, layers=1)
    tensors = tiny_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert checkpoint.config.tied is tied
    assert_same_tensors(checkpoint, tensors)


# -- formats of numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_gguf", [True, False])
def test_esb_65_bfloat16_keeps_its_range(as_gguf: bool, tmp_path: Path) -> None:
    """Values that float16 would turn into infinity or zero arrive exactly, and as bfloat16 where asked for as stored."""
    config = tiny_config("qwen2", layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tiny_tensors(config)
    tensors[name][0, :2] = np.array([1e5, 1e-8], ml_dtypes.bfloat16).astype(np.float32)
    if as_gguf:
        checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, tensors, kind="BF16"))
    else:
        checkpoint = open_checkpoint(write_hf(tmp_path, config, tensors, dtype="BF16"))
    stored = checkpoint.stored(name)
    assert (stored.kind, stored.data.dtype) == ("BF16", ml_dtypes.bfloat16)
    assert checkpoint.tensor(name)[0, :2].tolist() == [99840.0, float(ml_dtypes.bfloat16(1e-8))]


def test_unknown_tensor_name_is_a_key_error(tmp_path: Path) -> None:
    config = tiny_config("qwen3", layers=1)
    checkpoint = open_checkpoint(write_hf(tmp_path, config, tiny_tensors(config)))
    with pytest.raises(KeyError):
        checkpoint.tensor("lm_head.weight")
    with pytest.raises(KeyError):
        checkpoint.stored("lm_head.weight")


# -- variants of Hugging Face folders ------------------------------------------------------------------------------------


def test_gemma3_with_pictures_gives_its_language_model(tmp_path: Path) -> None:
    """Language model under a prefix, vision parts beside it, and a text_config that leaves out what the class defaults to."""
    config = tiny_config("gemma3", layers=6, vocab_rows=320)
    tensors = tiny_tensors(config)
    prefixed = {f"language_model.{name}": values for name, values in tensors.items()} | {
        "vision_tower.patch.weight": np.ones((2, 2), np.float32),
        "multi_modal_projector.weight": np.ones((2, 2), np.float32),
    }
    write_hf(tmp_path, config, prefixed)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    for key in ("layer_types", "rope_local_base_freq", "rope_theta", "tie_word_embeddings", "hidden_activation", "rms_norm_eps"):
        del text[key]
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 3}}))
    checkpoint = open_checkpoint(tmp_path)
    assert_same_config(checkpoint.config, config)
    assert_same_tensors(checkpoint, tensors)


def test_rope_parameters_of_newer_folders(tmp_path: Path) -> None:
    config = tiny_config("gemma3", rope_scaling=RopeScaling(kind="linear", factor=8.0))
    settings = {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    write_hf(tmp_path, config, tiny_tensors(config), settings=settings)
    assert_same_config(open_checkpoint(tmp_path).config, config)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=128)
    config = tiny_config("qwen2", layers=1, rope_scaling=scaling, max_context=128)
    write_hf(tmp_path / "hf", config, tiny_tensors(config))
    write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config))
    assert open_checkpoint(tmp_path / "hf").config.max_context == 512
    assert open_checkpoint(tmp_path / "m.gguf").config.max_context == 512


def test_license_of_a_model_card(tmp_path: Path) -> None:
    config = tiny_config("qwen3", layers=1)
    write_hf(tmp_path, config, tiny_tensors(config))
    assert open_checkpoint(tmp_path).license == ""
    (tmp_path / "README.md").write_text('---\ntags: [x]\nlicense: "apache-2.0"\n---\nlicense: other\n')
    assert open_checkpoint(tmp_path).license == "apache-2.0"


@pytest.mark.parametrize("as_gguf", [True, False])
def test_tokenizer_comes_with_the_weights(as_gguf: bool, tmp_path: Path) -> None:
    """The same ids from both formats; padding rows of the embedding are no tokens."""
    config = tiny_config("qwen2", layers=1)
    tensors = tiny_tensors(config)
    source = write_gguf(tmp_path / "m.gguf", config, tensors) if as_gguf else write_hf(tmp_path, config, tensors)
    found = open_checkpoint(source).tokenizer
    assert (found.kind, found.vocab_size, found.add_bos, set(found.stop_ids)) == ("tokenizers", VOCAB_SIZE, False, {0, EOS_ID})
    assert found.vocab_size < config.vocab_rows
    assert found.chat_template == CHAT_TEMPLATE
    rebuilt = Tokenizer.from_str(found.content.decode())
    for text in ("def the return string", "Ünïcode 日本 🎉", "a  b\n\n 12345", "<|im_start|>user\nhi<|im_end|>"):
        assert rebuilt.encode(text).ids == tiny_tokenizer().encode(text).ids
