from __future__ import annotations

import hashlib
import shutil
import weakref

import ml_dtypes
import numpy as np
import onnx
import pytest

from edgespec.backends.onnx import BACKEND
from edgespec.core.decoder import RopeScaling
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import MemoryCheckpoint
from edgespec_converters.quantize import quantize_tensor
from edgespec_converters.recipes import Format, Recipe, Rule
from edgespec_converters.targets import onnx as target
from edgespec_converters.targets.onnx import write
from tests.helpers.engines import make_reference
from tests.helpers.packages import write_package
from tests.helpers.tiny import tiny_checkpoint, tiny_config

FLOAT32 = Recipe("float32", Format(32))
INT8 = Recipe("int8", Format(8, 32))
INT4 = Recipe("int4", Format(4, 32, symmetric=False))
TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 3, 21]


def vocab_size(checkpoint: MemoryCheckpoint) -> int:
    return checkpoint.tokenizer.vocab_size


def convert(checkpoint: MemoryCheckpoint, recipe: Recipe, folder):
    """The artifact, and an engine that runs it."""
    manifest = write_package(target, checkpoint, folder, recipe)
    (artifact,) = manifest.artifacts
    return artifact, BACKEND.load(folder, manifest, artifact)


def logits(engine) -> np.ndarray:
    out = engine.forward([(TokenBatch.chain(TOKENS), engine.new_cache(32))])[0].logits
    return np.stack([out.row(i).copy() for i in range(len(out))])


def dequantised(checkpoint: MemoryCheckpoint, recipe: Recipe) -> MemoryCheckpoint:
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        format = recipe.format_for(name, tensor.shape)
        tensors[name] = quantize_tensor(checkpoint, name, format).dequantize() if format.quantized else tensor
    return MemoryCheckpoint(config=checkpoint.config, tensors=tensors, tokenizer=checkpoint.tokenizer)


def assert_like_reference(engine, checkpoint: MemoryCheckpoint, tmp_path, recipe: Recipe):
    """Within what 8-bit activations cost of the float32 reference over the same, dequantised weights."""
    expected = logits(make_reference(dequantised(checkpoint, recipe), tmp_path))
    error = np.abs(logits(engine) - expected).max() / expected.std()
    assert error < 0.15


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(kind="llama3", factor=8.0, original_context=16),
        RopeScaling(kind="yarn", factor=4.0, original_context=64),
    ],
    ids=lambda s: s.kind,
)
@pytest.mark.parametrize("head_dim", [8, 16])
def test_rope_scaling_agrees_with_the_reference(tmp_path, scaling, head_dim):
    checkpoint = tiny_checkpoint(tiny_config("llama", rope_scaling=scaling, head_dim=head_dim))
    _, engine = convert(checkpoint, FLOAT32, tmp_path)
    np.testing.assert_allclose(logits(engine), logits(make_reference(checkpoint, tmp_path)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("recipe", [INT8, INT4], ids=lambda r: r.name)
def test_quantised_weights_are_the_quantisers(tmp_path, family, recipe):
    checkpoint = tiny_checkpoint(tiny_config(family))
    artifact, engine = convert(checkpoint, recipe, tmp_path)
    assert artifact.width_invariant
    assert not artifact.exceptions
    assert_like_reference(engine, checkpoint, tmp_path, recipe)


@pytest.mark.parametrize(
    ("head_dim", "format", "invariant"),
    [(128, Format(8, 32), True), (160, Format(8, 32), False), (16, Format(4, 64), False), (16, Format(32), False)],
    ids=str,
)
def test_only_verified_formats_and_head_sizes_claim_width_invariance(tmp_path, head_dim, format, invariant):
    checkpoint = tiny_checkpoint(tiny_config("llama", head_dim=head_dim, hidden=64, ffn=64))
    artifact = write(checkpoint, Recipe("any", format), tmp_path / "onnx", vocab_size=vocab_size(checkpoint))
    assert artifact.width_invariant is invariant


def test_stacked_matrices_may_have_different_formats(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("qwen2"))
    rules = (Rule("*.v_proj.weight", Format(8, 16)), Rule("*.up_proj.weight", Format(32)))
    recipe = Recipe("mixed", Format(8, 32), rules)
    artifact, engine = convert(checkpoint, recipe, tmp_path)
    assert not artifact.width_invariant
    assert_like_reference(engine, checkpoint, tmp_path, recipe)


@pytest.mark.parametrize("recipe", [FLOAT32, INT8, INT4], ids=lambda r: r.name)
def test_esb_41_a_tied_head_is_the_embedding_and_stored_once(tmp_path, recipe):
    tied = tiny_checkpoint(tiny_config("llama", tied=True))
    twin = {**tied.tensors, "lm_head.weight": tied.tensors["model.embed_tokens.weight"]}
    untied = MemoryCheckpoint(config=tiny_config("llama"), tensors=twin, tokenizer=tied.tokenizer)
    artifact, engine = convert(tied, recipe, tmp_path / "tied")
    other, expected = convert(untied, recipe, tmp_path / "untied")
    np.testing.assert_array_equal(logits(engine), logits(expected))
    saved = sum(f.nbytes for f in other.files.values()) - sum(f.nbytes for f in artifact.files.values())
    format = recipe.default
    assert saved > 0.9 * vocab_size(tied) * tied.config.hidden * format.bits / 8
    assert artifact.weight_bytes == other.weight_bytes


def test_esb_63_rows_that_no_block_divides(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama", hidden=96, ffn=40))
    recipe = Recipe("int8", Format(8, 64))
    artifact, engine = convert(checkpoint, recipe, tmp_path)
    down, query = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    assert "float32" in artifact.exceptions[down] and "40" in artifact.exceptions[down]
    assert "block 32" in artifact.exceptions[query]
    assert not artifact.width_invariant
    weights = sum(np.prod(shape) for shape in checkpoint.config.shapes().values())
    on_disk = sum((tmp_path / name).stat().st_size for name in artifact.files)
    assert artifact.bits_per_weight * weights / 8 == pytest.approx(on_disk)
    assert logits(engine).std() > 0.1


def test_esb_64_large_constants_are_outside_the_graph_and_the_pair_can_move(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "GRAPH_LIMIT_BYTES", 1 << 20)
    checkpoint = tiny_checkpoint(tiny_config("qwen3", hidden=256, ffn=512, vocab_rows=2048, max_context=2048))
    artifact, engine = convert(checkpoint, FLOAT32, tmp_path / "here")
    folder = tmp_path / "here" / artifact.folder
    assert sorted(path.name for path in folder.iterdir()) == ["model.data", "model.onnx"]
    assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) > 4 << 20
    assert (folder / "model.onnx").stat().st_size < 1 << 17
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    table = next(tensor for tensor in model.graph.initializer if tensor.name == "model.embed_tokens.weight")
    assert table.data_location == onnx.TensorProto.EXTERNAL
    shutil.move(tmp_path / "here", tmp_path / "there")
    manifest = write_package(target, checkpoint, tmp_path / "again", FLOAT32)
    moved = BACKEND.load(tmp_path / "there", manifest, artifact)
    np.testing.assert_array_equal(logits(moved), logits(engine))


def test_a_graph_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "GRAPH_LIMIT_BYTES", 1000)
    with pytest.raises(ArtifactError, match="1000"):
        convert(tiny_checkpoint(tiny_config("llama")), INT8, tmp_path)


def test_files_are_recorded_as_they_are(tmp_path):
    artifact, _ = convert(tiny_checkpoint(tiny_config("llama")), INT8, tmp_path)
    for name, record in artifact.files.items():
        content = (tmp_path / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (record.nbytes, record.sha256)


def test_weights_are_written_one_group_at_a_time(tmp_path, monkeypatch):
    checkpoint = tiny_checkpoint(tiny_config("llama", layers=5))
    alive: list[weakref.ref] = []
    most = 0

    def tensor(self, name):
        nonlocal most
        out = self.tensors[name].copy()
        alive.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in alive))
        return out

    monkeypatch.setattr(MemoryCheckpoint, "tensor", tensor)
    write(checkpoint, FLOAT32, tmp_path / "onnx", vocab_size=vocab_size(checkpoint))
    assert len(alive) == len(checkpoint.tensors)
    assert most <= 3  # query, key and value


def test_progress_ends_at_the_end(tmp_path):
    seen = []
    checkpoint = tiny_checkpoint(tiny_config("qwen2"))
    write(checkpoint, INT8, tmp_path / "onnx", vocab_size=vocab_size(checkpoint), progress=lambda done, total: seen.append((done, total)))
    total = len(checkpoint.config.shapes())
    assert seen == [(i + 1, total) for i in range(total)]


def test_weights_that_are_not_finite_are_refused(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(ArtifactError, match=r"layers\.1\.mlp\.up_proj"):
        convert(checkpoint, INT8, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", [INT8, INT4], ids=lambda r: r.name)
def test_a_head_in_parts_gives_the_same_bits_and_is_stored_once(tmp_path, monkeypatch, tied, recipe):
    checkpoint = tiny_checkpoint(tiny_config("llama", tied=tied))
    whole, engine = convert(checkpoint, recipe, tmp_path / "whole")
    monkeypatch.setattr(target, "_PAGE_BYTES", 64)
    monkeypatch.setattr(target, "HEAD_PART_BYTES", 1)
    parts, engine_in_parts = convert(checkpoint, recipe, tmp_path / "parts")
    model = onnx.load(tmp_path / "parts" / parts.folder / "model.onnx", load_external_data=False)
    assert sum(node.op_type == "Concat" for node in model.graph.node) == 1
    assert parts.weight_bytes == whole.weight_bytes
    np.testing.assert_array_equal(logits(engine_in_parts), logits(engine))


def test_esb_65_bfloat16_and_asked_for_float16_stay_float32(tmp_path):
    """No float16 anywhere on this engine, so nothing overflows or vanishes: what was asked for and not given is listed."""
    checkpoint = tiny_checkpoint(tiny_config("llama", layers=1))
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.array([1e5, 1e-8], ml_dtypes.bfloat16).astype(np.float32)
    checkpoint.tensors[name][0, :2] = values
    artifact, _ = convert(checkpoint, Recipe("half", Format(16)), tmp_path)
    assert artifact.exceptions[name] == "float32 (no float16 kernels on this engine)"
    data = (tmp_path / artifact.folder / "model.data").read_bytes()
    assert np.isin(values, np.frombuffer(data[: len(data) // 4 * 4], "<f4")).all()
