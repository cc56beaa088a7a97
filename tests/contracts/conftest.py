from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from edgespec.core.decoder import FAMILIES, DecoderConfig
from edgespec.core.engine import Cache, Engine, TokenBatch
from edgespec_converters.checkpoint import MemoryCheckpoint
from tests.helpers.engines import ENGINES, EngineCase, make_reference
from tests.helpers.tiny import tiny_checkpoint, tiny_config


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One engine under contract, and the reference engine of the same checkpoint."""

    case: EngineCase
    config: DecoderConfig
    engine: Engine
    reference: Engine
    fresh: Callable[[], Engine]

    def logits(self, cache: Cache, batch: TokenBatch) -> np.ndarray:
        """float32 [scored, V], copied out."""
        logits = self.engine.forward([(batch, cache)])[0].logits
        return np.stack([logits.row(i).copy() for i in range(len(logits))])

    def scratch(self, tokens: list[int]) -> np.ndarray:
        """float32 [V]: logits after `tokens`, computed one token at a time in a new cache."""
        cache = self.engine.new_cache(len(tokens))
        for token in tokens:
            row = self.logits(cache, TokenBatch.chain([token]))[0]
            cache.commit([0])
        return row

    def prefilled(self, tokens: list[int], capacity: int = 64) -> Cache:
        cache = self.engine.new_cache(capacity)
        self.engine.forward([(TokenBatch.chain(tokens, scored=0), cache)])
        cache.commit(range(len(tokens)))
        return cache

    def close_to(self, actual: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=self.case.atol)

    def random_tokens(self, rng: np.random.Generator, n: int) -> list[int]:
        return rng.integers(0, self.engine.spec.vocab_size, n).tolist()

    def random_batch(self, rng: np.random.Generator, n: int) -> TokenBatch:
        """A random tree, or a chain if the engine takes no trees."""
        tokens = np.asarray(self.random_tokens(rng, n), np.int32)
        if self.engine.capabilities.rollback == "tail":
            return TokenBatch.chain(tokens)
        return TokenBatch(tokens, np.array([rng.integers(-1, i) for i in range(n)], np.int32))


@pytest.fixture(scope="session", params=[(case, family) for case in ENGINES for family in FAMILIES], ids=lambda p: f"{p[0].name}-{p[1]}")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    case, family = request.param
    if reason := case.backend.why_not():
        pytest.skip(reason)
    checkpoint: MemoryCheckpoint = tiny_checkpoint(tiny_config(family))
    folder = tmp_path_factory.mktemp(f"{case.name}-{family}")

    def fresh() -> Engine:
        return case.make(checkpoint, folder)

    return Subject(case=case, config=checkpoint.config, engine=fresh(), reference=make_reference(checkpoint, folder), fresh=fresh)
