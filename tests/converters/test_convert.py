import hashlib
from dataclasses import replace

import numpy as np
import pytest

from edgespec.backends import reference
from edgespec.core.decoder import FAMILIES
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import Manifest
from edgespec.orchestrator import store
from edgespec.orchestrator.text import Tokenizer
from edgespec_converters.convert import convert
from tests.helpers.engines import ENGINES, make_reference
from tests.helpers.tiny import VOCAB_SIZE, tiny_checkpoint, tiny_config

BACKENDS = {case.name: case.backend for case in ENGINES}
PROMPT = TokenBatch.chain([5, 9, 2, 7, 7, 1, 30, 12, 4, 3, 21])


def converted(checkpoint, folder, **options):
    settings = {"name": "tiny", "recipe": "float32", "targets": ("onnx", "mlx"), "destination": folder} | options
    return convert(checkpoint, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_package_is_whole_and_every_engine_loads_it(family, tmp_path):
    checkpoint = tiny_checkpoint(tiny_config(family))
    manifest = converted(checkpoint, tmp_path)
    assert Manifest.from_json((tmp_path / "manifest.json").read_text(encoding="utf-8")) == manifest
    tokenizer = Tokenizer.load(tmp_path, manifest.tokenizer, manifest.vocab_size)
    assert manifest.vocab_digest == tokenizer.digest()
    assert [(a.engine, a.recipe) for a in manifest.artifacts] == [("onnx", "float32"), ("mlx", "float32")]
    expected = make_reference(checkpoint, tmp_path)
    expected_row = expected.forward([(PROMPT, expected.new_cache(16))])[0].logits.row(10)
    for artifact in manifest.artifacts:
        assert artifact.parity is not None
        assert artifact.parity.kl < 1e-8
        assert artifact.parity.max_error < 1e-4
        assert artifact.parity.n > 300
        loaders = [BACKENDS[artifact.engine], *([reference.BACKEND] if artifact.engine == "mlx" else [])]
        for backend in loaders:
            if backend.why_not() is not None:
                continue
            engine = backend.load(tmp_path, manifest, artifact)
            assert engine.spec.vocab_digest == manifest.vocab_digest
            np.testing.assert_allclose(engine.forward([(PROMPT, engine.new_cache(16))])[0].logits.row(10), expected_row, atol=1e-4)
            engine.close()


def test_the_manifest_lists_every_file_with_its_sha256(tmp_path):
    manifest = converted(tiny_checkpoint(tiny_config("llama")), tmp_path)
    package = store.open_package(tmp_path)
    recorded = dict(package.records())
    present = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(recorded) == present - {"manifest.json"}
    assert {"tokenizer.json", "chat_template.jinja"} <= present
    for path, record in recorded.items():
        assert hashlib.sha256((tmp_path / path).read_bytes()).hexdigest() == record.sha256
    assert package.manifest == manifest


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_quantised_recipes_are_measured(recipe, tmp_path):
    manifest = converted(tiny_checkpoint(tiny_config("qwen2", hidden=128, ffn=192)), tmp_path, recipe=recipe)
    onnx, mlx = (artifact.parity for artifact in manifest.artifacts)
    assert onnx is not None
    assert mlx is not None
    assert 0 < mlx.kl < 1
    assert mlx.kl * 0.9 < onnx.kl < mlx.kl * 3  # the same codes, but ONNX Runtime rounds activations to 8 bits as well


def test_a_gate_that_is_missed_stops_the_conversion(tmp_path):
    recipe = tmp_path / "strict.toml"
    recipe.write_text('name = "strict"\n[default]\nbits = 4\nblock = 32\n[gate]\nkl = 1e-9\n')
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    with pytest.raises(ArtifactError, match="tiny as mlx-strict strays too far"):
        converted(checkpoint, tmp_path / "a", recipe=str(recipe), targets=["mlx"])
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_esb_41_tied_models_have_a_head_and_do_not_grow(tmp_path):
    """Both ways of storing give the same logits; the tied one carries no second matrix."""
    tied = tiny_checkpoint(tiny_config("llama", tied=True))
    untied = tiny_checkpoint(tiny_config("llama"))
    untied.tensors = tied.tensors | {"lm_head.weight": tied.tensors["model.embed_tokens.weight"]}
    a, b = converted(tied, tmp_path / "a", recipe="int8"), converted(untied, tmp_path / "b", recipe="int8")
    for one, two in zip(a.artifacts, b.artifacts, strict=True):
        assert sum(f.nbytes for f in one.files.values()) < sum(f.nbytes for f in two.files.values()) - VOCAB_SIZE * 64
        assert one.parity is not None
        assert two.parity is not None
        assert one.parity.kl == pytest.approx(two.parity.kl, rel=0.3)


def test_esb_63_layers_of_odd_widths_fall_back_and_are_listed(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama", layers=1, hidden=72, heads=9, kv_heads=3, head_dim=8, ffn=4304))
    manifest = converted(checkpoint, tmp_path, recipe="int8")
    for artifact in manifest.artifacts:
        assert "4304 columns" in artifact.exceptions["model.layers.0.mlp.down_proj.weight"]
        assert "72 columns" in artifact.exceptions["model.layers.0.mlp.up_proj.weight"]
        size = sum(record.nbytes for record in artifact.files.values())
        values = sum(int(np.prod(shape)) for shape in checkpoint.config.shapes().values())
        assert artifact.bits_per_weight == pytest.approx(8 * size / values, rel=0.2)


def test_esb_63_a_width_of_32_takes_a_smaller_group(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama", layers=1, hidden=32, heads=4, head_dim=8))
    for artifact in converted(checkpoint, tmp_path, recipe="int8").artifacts:
        assert artifact.exceptions["model.layers.0.mlp.up_proj.weight"] == "int8 block 32 (block 64 does not divide 32 columns)"
        assert artifact.parity is not None


@pytest.mark.parametrize("change", [{"vocab_size": 321}, {"stop_ids": (2, 320)}, {"bos_id": 400}])
def test_esb_66_ids_without_an_embedding_row_are_refused(change, tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tokenizer = replace(checkpoint.tokenizer, **change)
    with pytest.raises(ArtifactError, match="its embedding 320 rows; tokenizer and weights do not belong together"):
        converted(checkpoint, tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_targets_and_recipes_are_refused_before_any_work(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    with pytest.raises(ArtifactError, match=r"unknown targets \['coreml'\]; there are onnx, mlx"):
        converted(checkpoint, tmp_path, targets=["coreml"])
    with pytest.raises(ArtifactError, match="no recipe 'int3'"):
        converted(checkpoint, tmp_path, recipe="int3")
    assert not list(tmp_path.iterdir())


def test_progress_reaches_the_end_of_every_stage(tmp_path):
    last = {}

    def progress(stage, done, total):
        last[stage] = (done, total)

    converted(tiny_checkpoint(tiny_config("llama")), tmp_path, progress=progress)
    assert list(last) == ["convert for onnx", "convert for mlx", "reference", "compare"]
    assert all(done == total for done, total in last.values())
