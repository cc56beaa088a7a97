"""Rotary row order under grouped-query attention: read with the wrong head count, a model writes fluent nonsense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.reference import ReferenceEngine
from edgespec.core.decoder import Family
from edgespec.core.engine import TokenBatch
from edgespec_converters.checkpoint import open_checkpoint
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, tiny_tensors, write_gguf, write_hf

TOKENS = list(range(3, 21))
POSITIONS = [0, 17]
IDS = [5, 100, 200, 290]
# Logits of llama.cpp (its Python binding 0.3.36, KV cache in float32) for the GGUF file that this test writes.
LLAMA_CPP: dict[Family, list[list[float]]] = {
    "llama": [[-0.564021, 1.551598, -1.227632, 1.147127], [-1.231404, 0.26705, -2.971847, -1.215381]],
    "qwen2": [[1.260541, 0.912475, 0.475104, 2.015607], [-0.623098, 0.870223, -1.054066, 0.186078]],
    "qwen3": [[0.097944, 0.094363, 1.093585, -1.34693], [0.737838, -0.541464, 0.684075, 0.250428]],
    "gemma3": [[0.640736, 1.804372, -0.508, 0.119654], [0.101536, 0.143979, -0.389919, 1.510772]],
}


def logits(source: Path) -> np.ndarray:
    """float32 [positions, ids] of the reference engine on what the source holds."""
    checkpoint = open_checkpoint(source)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    engine = ReferenceEngine(checkpoint.config, tensors, name="tiny", vocab_size=VOCAB_SIZE, vocab_digest="tiny")
    scores = engine.forward([(TokenBatch.chain(TOKENS), engine.new_cache(32))])[0]
    return np.stack([scores.logits.row(position)[IDS] for position in POSITIONS])


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_esb_40_logits_equal_those_of_llama_cpp(family: Family, tmp_path: Path) -> None:
    """8 heads on 2 kv heads, position 0 (no rotation) and 17. llama.cpp looks GELU up in a float16 table: gemma3 is less exact."""
    config = tiny_config(family)
    tensors = tiny_tensors(config)
    from_gguf = logits(write_gguf(tmp_path / "m.gguf", config, tensors))
    np.testing.assert_allclose(from_gguf, LLAMA_CPP[family], atol=2e-3 if family == "gemma3" else 1e-4)
    np.testing.assert_array_equal(logits(write_hf(tmp_path / "hf", config, tensors)), from_gguf)
