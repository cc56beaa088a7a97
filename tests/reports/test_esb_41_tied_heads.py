"""ESB-41: a tied head is the embedding in every output format and width, and is stored once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.backends.reference import StoredWeights
from edgespec.core.engine import TokenBatch
from edgespec.orchestrator import store
from tests.helpers.command import edgespec as command
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, tiny_tensors, write_gguf, write_hf

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WIDE = {"hidden": 128, "head_dim": 16, "ffn": 192}
BYTES = {"float32": 4.0, "int8": 1.0, "int4": 1.0}  # per weight of the head, at the least: int4 keeps embedding and head in 8 bits


@pytest.mark.parametrize("recipe", BYTES)
@pytest.mark.parametrize("source", ["hf", "gguf"])
def test_esb_41_every_format_and_width_loads_generates_and_stores_one_matrix(source: str, recipe: str, tmp_path: Path) -> None:
    """The tie flag is absent from config.json (and GGUF has none): a missing head means a tied one."""
    tied = tiny_config("llama", tied=True, layers=1, **WIDE)
    tensors = tiny_tensors(tied)
    twin = tensors | {HEAD: tensors[EMBEDDING]}
    write = (
        (lambda name, *model: write_gguf(tmp_path / f"{name}.gguf", *model))
        if source == "gguf"
        else (lambda name, *model: write_hf(tmp_path / name, *model, settings={"tie_word_embeddings": None}))
    )
    for name, config, values in (("tied", tied, tensors), ("twin", tiny_config("llama", layers=1, **WIDE), twin)):
        path = str(write(name, config, values))
        result = command("convert", path, "--recipe", recipe, "--targets", "onnx,mlx", home=tmp_path / "home")
        assert result.code == 0, result.err
    one, two = (store.open_package(tmp_path / "home" / "packages" / name) for name in ("tied", "twin"))
    assert one.manifest.decoder.tied and not two.manifest.decoder.tied

    for a, b in zip(one.manifest.artifacts, two.manifest.artifacts, strict=True):
        saved = sum(f.nbytes for f in b.files.values()) - sum(f.nbytes for f in a.files.values())
        assert saved > VOCAB_SIZE * tied.hidden * BYTES[recipe]

    weights, apart = StoredWeights(one.path / f"mlx-{recipe}"), StoredWeights(two.path / f"mlx-{recipe}")
    assert HEAD not in weights
    np.testing.assert_array_equal(apart[HEAD], weights[EMBEDDING])

    ids = list(range(3, 20))
    for engine in ("reference", "onnx"):
        with (
            edgespec.load(one.path, engine=engine, draft="none") as runtime,
            edgespec.load(two.path, engine=engine, draft="none") as expected,
        ):
            found, wanted = (r.target.forward([(TokenBatch.chain(ids), r.target.new_cache(32))])[0].logits for r in (runtime, expected))
            for row in range(len(ids)):
                np.testing.assert_array_equal(found.row(row), wanted.row(row))
            answers = [r.session().generate("the string", max_tokens=6) for r in (runtime, expected)]
            assert answers[0].token_ids == answers[1].token_ids
            assert answers[0].stats.tokens > 0
