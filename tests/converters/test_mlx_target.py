import hashlib
import json
from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from edgespec.backends.mlx import BACKEND
from edgespec.core.decoder import FAMILIES, RopeScaling
from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import StoredTensor
from edgespec_converters.quantize import quantize, quantize_tensor
from edgespec_converters.recipes import FLOAT, Format, Recipe, Rule, load_recipe
from edgespec_converters.targets import mlx as target
from edgespec_converters.targets.mlx import pack, write
from tests.helpers.packages import write_package
from tests.helpers.tiny import EOS_ID, VOCAB_SIZE, hf_config, tiny_checkpoint, tiny_config

needs_mlx = pytest.mark.skipif(BACKEND.why_not() is not None, reason=BACKEND.why_not() or "")

UP = "model.layers.1.mlp.up_proj"


class StoredAs:
    """A checkpoint whose file holds every matrix as this GGML type."""

    def __init__(self, inner, kind):
        self._inner, self._kind = inner, gguf.GGMLQuantizationType[kind]

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def tensor(self, name):
        stored = self.stored(name)
        return gguf.quants.dequantize(stored.data, self._kind) if stored.kind == self._kind.name else self._inner.tensor(name)

    def stored(self, name):
        values = self._inner.tensor(name)
        if values.ndim != 2:
            return self._inner.stored(name)
        return StoredTensor(kind=self._kind.name, shape=values.shape, data=gguf.quants.quantize(values, self._kind))


def converted(folder, checkpoint, recipe, **options):
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    artifact = write(checkpoint, recipe, folder / "out", vocab_size=checkpoint.tokenizer.vocab_size, progress=None, **options)
    tensors = {}
    for path in sorted((folder / "out").glob("*.safetensors")):
        tensors |= load_file(path)
    return artifact, tensors, json.loads((folder / "out" / "config.json").read_text())


@needs_mlx
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_are_packed_as_mlx_packs_them(bits, group):
    import mlx.core as mx

    weight = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    words, scales, biases = mx.quantize(mx.array(weight), group_size=group, bits=bits)
    scale, bias = (np.repeat(np.array(a), group, axis=1) for a in (scales, biases))
    codes = np.rint((np.array(mx.dequantize(words, scales, biases, group_size=group, bits=bits)) - bias) / scale).astype(np.uint8)
    np.testing.assert_array_equal(pack(codes, bits), np.array(words))


@needs_mlx
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_reads_the_same_weights_as_were_quantised(tmp_path, bits, symmetric):
    import mlx.core as mx

    checkpoint, format = tiny_checkpoint(tiny_config("llama")), Format(bits, 32, symmetric)
    converted(tmp_path, checkpoint, Recipe("r", format))
    file = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert file[f"{UP}.weight"].dtype == mx.uint32
    parts = (file[f"{UP}.weight"], file[f"{UP}.scales"].astype(mx.float32), file[f"{UP}.biases"].astype(mx.float32))
    found = np.array(mx.dequantize(*parts, group_size=32, bits=bits))
    quantized = quantize_tensor(checkpoint, f"{UP}.weight", format)
    # As float16 a scale is off by at most 2^-11 of itself, a bias by as much again.
    largest = np.abs(np.repeat(quantized.scales, 32, axis=1)) * (1 << bits) / 2**10
    assert np.all(np.abs(found - quantized.dequantize()) <= largest)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4)])
def test_ggufs_own_blocks_stay_exact(tmp_path, kind, bits):
    """Their float16 scales, and the bias -2^(bits - 1) times as much, fit float16; block 64 of the recipe gives way to theirs."""
    checkpoint = StoredAs(tiny_checkpoint(tiny_config("llama")), kind)
    artifact, tensors, config = converted(tmp_path, checkpoint, Recipe("r", Format(bits, 64)))
    assert artifact.exceptions[f"{UP}.weight"] == f"int{bits} block 32 (the source's own blocks)"
    assert config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    words, scales, biases = (tensors[f"{UP}.{part}"] for part in ("weight", "scales", "biases"))
    codes = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    blocks = codes.reshape(*scales.shape, 32) * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    np.testing.assert_array_equal(blocks.reshape(96, 64).astype(np.float32), checkpoint.tensor(f"{UP}.weight"))


@pytest.mark.parametrize("family", FAMILIES)
def test_config_is_what_hugging_face_would_write(tmp_path, family):
    config = tiny_config(family)
    _, _, found = converted(tmp_path, tiny_checkpoint(config), "float32")
    expected = hf_config(config) | {"bos_token_id": None, "eos_token_id": [0, EOS_ID]}
    assert {key: found[key] for key in expected} == expected
    assert "quantization" not in found


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_config_tells_rope_scaling(tmp_path, kind):
    config = tiny_config("llama", rope_scaling=RopeScaling(kind=kind, factor=4.0, original_context=0 if kind == "linear" else 64))
    _, _, found = converted(tmp_path, tiny_checkpoint(config), "float32")
    assert found["rope_scaling"] == hf_config(config)["rope_scaling"]


def test_gemma_pattern_counts_to_the_first_global_layer(tmp_path):
    for sliding, pattern in (((True, True, False) * 2, 3), ((True,) * 6, 7)):
        config = tiny_config("gemma3", layers=6, sliding=sliding)
        assert converted(tmp_path, tiny_checkpoint(config), "float32")[2]["sliding_window_pattern"] == pattern


def test_norms_keep_hugging_faces_convention_and_a_tied_head_is_not_there(tmp_path):
    """ESB-41: gemma's norms are stored less one, the head is the embedding, stored once."""
    checkpoint = tiny_checkpoint(tiny_config("gemma3"))
    artifact, tensors, config = converted(tmp_path, checkpoint, "int8")
    assert config["tie_word_embeddings"] is True
    assert not [name for name in tensors if name.startswith("lm_head")]
    np.testing.assert_array_equal(tensors["model.norm.weight"].astype(np.float32), checkpoint.tensor("model.norm.weight"))
    assert artifact.weight_bytes == sum(t.nbytes for t in tensors.values())


def test_an_untied_embedding_is_not_read_for_each_token(tmp_path):
    artifact, tensors, _ = converted(tmp_path, tiny_checkpoint(tiny_config("llama")), "int8")
    embedding = sum(t.nbytes for name, t in tensors.items() if name.startswith("model.embed_tokens"))
    assert artifact.weight_bytes == sum(t.nbytes for t in tensors.values()) - embedding


def test_esb_63_widths_that_no_group_divides(tmp_path):
    """Width 96: a smaller group. Width 80: float32. Both in the report and in config.json; bits per weight is the file's size."""
    for ffn, expected, layer in (
        (96, "int4 block 32 (block 64 does not divide 96 columns)", {"group_size": 32, "bits": 4}),
        (80, "float32 (block 64 does not divide 80 columns)", False),
    ):
        artifact, tensors, config = converted(tmp_path, tiny_checkpoint(tiny_config("qwen2", ffn=ffn)), Recipe("r", Format(4, 64)))
        down = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
        assert artifact.exceptions == {f"{name}.weight": expected for name in down}
        assert config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"} | dict.fromkeys(down, layer)
        assert tensors[f"{down[0]}.weight"].dtype == (np.uint32 if layer else np.float32)
        weights = sum(int(np.prod(shape)) for shape in tiny_config("qwen2", ffn=ffn).shapes().values())
        assert artifact.bits_per_weight * weights == 8 * (tmp_path / "out" / "model.safetensors").stat().st_size


@needs_mlx
def test_esb_63_bits_null_is_read_as_not_quantised(tmp_path):
    """config.json from elsewhere may say it that way; whatever it says, the tensors' own shapes decide."""
    checkpoint = tiny_checkpoint(tiny_config("llama", ffn=80))
    manifest = write_package(target, checkpoint, tmp_path, "int8")
    artifact = manifest.artifacts[0]
    path = tmp_path / artifact.folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization"] = {k: v or {"bits": None, "group_size": None} for k, v in config["quantization"].items()}
    path.write_text(json.dumps(config))
    record = replace(artifact.files[f"{artifact.folder}/config.json"], nbytes=path.stat().st_size)
    artifact = replace(artifact, files={**artifact.files, f"{artifact.folder}/config.json": record})
    assert BACKEND.load(tmp_path, manifest, artifact).spec.layers == 3


def test_rules_choose_a_format_per_layer(tmp_path):
    recipe = Recipe("mixed", Format(4, 32), (Rule("*.down_proj.weight", Format(8, 32)), Rule("lm_head.weight", Format(16))))
    _, tensors, config = converted(tmp_path, tiny_checkpoint(tiny_config("llama")), recipe)
    down = {f"model.layers.{i}.mlp.down_proj": {"group_size": 32, "bits": 8} for i in range(3)}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine", "lm_head": False} | down
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (64, 96 // 4)
    assert tensors["lm_head.weight"].dtype == np.float16


def test_esb_65_bfloat16_stays_bfloat16_to_the_bit(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    values = checkpoint.tensors[f"{UP}.weight"]
    values[0, :3] = np.array([1e5, 1e-8, -1e30], ml_dtypes.bfloat16).astype(np.float32)
    checkpoint.tensors["model.norm.weight"][0] = np.float32(ml_dtypes.bfloat16(1e5))
    artifact, tensors, config = converted(tmp_path, StoredAs(checkpoint, "BF16"), Recipe("half", Format(16)))
    assert {t.dtype for t in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.astype(np.float32), checkpoint.tensor(name))
    assert artifact.exceptions == {}
    assert config["torch_dtype"] == "bfloat16"


def test_esb_65_what_float16_cannot_hold_stays_float32_and_is_named(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tensors[f"{UP}.weight"][0, :3] = [1e5, 1e-9, -1e6]
    artifact, tensors, config = converted(tmp_path, checkpoint, Recipe("half", Format(16)))
    assert artifact.exceptions == {f"{UP}.weight": "float32 (2 values overflow and 1 vanish in float16)"}
    np.testing.assert_array_equal(tensors[f"{UP}.weight"], checkpoint.tensor(f"{UP}.weight"))
    assert tensors["model.norm.weight"].dtype == np.float16
    assert config["torch_dtype"] == "float16"


def test_scales_that_overflow_float16_stay_float32(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tensors[f"{UP}.weight"][0, 0] = 1e6
    artifact, tensors, _ = converted(tmp_path, checkpoint, Recipe("r", Format(8, 32)))
    assert artifact.exceptions == {f"{UP}.weight": "float32 scales (they overflow float16)"}
    assert tensors[f"{UP}.scales"].dtype == np.float32
    np.testing.assert_array_equal(
        tensors[f"{UP}.scales"], quantize(checkpoint.tensor(f"{UP}.weight"), bits=8, block=32, symmetric=True).scales
    )


@pytest.mark.parametrize(
    ("family", "stored", "expected"),
    [
        ("llama", "F32", np.float16),
        ("llama", "F16", np.float16),
        ("llama", "BF16", ml_dtypes.bfloat16),
        ("gemma3", "F32", ml_dtypes.bfloat16),
    ],
)
def test_scales_and_vectors_share_the_type_of_the_activations(tmp_path, family, stored, expected):
    _, tensors, _ = converted(tmp_path, StoredAs(tiny_checkpoint(tiny_config(family)), stored), "int8")
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.uint32), np.dtype(expected)}


def test_a_float32_recipe_stores_what_the_checkpoint_says(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("qwen3"))
    artifact, tensors, _ = converted(tmp_path, checkpoint, Recipe("float", FLOAT))
    assert tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, checkpoint.tensor(name))
    assert artifact.exceptions == {}


def test_the_artifact_records_every_file_shards_and_index_included(tmp_path):
    artifact, tensors, _ = converted(tmp_path, tiny_checkpoint(tiny_config("llama")), "int8", shard_bytes=50_000)
    names = {f"out/{path.name}" for path in (tmp_path / "out").iterdir()}
    assert artifact.files.keys() == names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    for name, record in artifact.files.items():
        content = (tmp_path / name).read_bytes()
        assert (record.sha256, record.nbytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (artifact.engine, artifact.recipe, artifact.folder) == ("mlx", "int8", "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_progress_counts_every_tensor(tmp_path):
    seen = []
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    write(checkpoint, load_recipe("int8"), tmp_path / "out", vocab_size=VOCAB_SIZE, progress=lambda done, total: seen.append((done, total)))
    n = len(checkpoint.config.shapes())
    assert seen == [(i + 1, n) for i in range(n)]


def test_weights_that_are_not_finite_are_refused(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tensors[f"{UP}.weight"][0, 0] = np.nan
    with pytest.raises(ArtifactError, match=UP):
        converted(tmp_path, checkpoint, "int8")


def test_fewer_rows_than_tokens_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match="320 embedding rows for 321 tokens"):
        write(tiny_checkpoint(tiny_config("llama")), load_recipe("int8"), tmp_path / "out", vocab_size=321, progress=None)
