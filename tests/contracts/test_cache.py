"""After every step a cache equals recomputing from scratch: random trees, random kept paths, truncations, passes never committed."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from edgespec.core.draft import path_to
from edgespec.core.engine import TokenBatch

CAPACITY = 40
SEEDS = st.integers(0, 1 << 16)


def machine(subject):
    class CacheMachine(RuleBasedStateMachine):
        """`tokens` is the whole truth: what the cache must be equal to."""

        @initialize()
        def start(self):
            self.tokens: list[int] = []
            self.cache = subject.engine.new_cache(CAPACITY)

        def room(self) -> int:
            return CAPACITY - len(self.tokens)

        @precondition(lambda self: self.room() > 0)
        @rule(seed=SEEDS, rows=st.integers(1, 9), node=st.integers(-1, 8))
        def score_and_commit(self, seed: int, rows: int, node: int):
            rng = np.random.default_rng(seed)
            batch = subject.random_batch(rng, min(rows, self.room()))
            node = min(node, len(batch) - 1)
            scored = subject.logits(self.cache, batch)
            path = path_to(batch.parents, node)
            self.cache.commit(path)
            self.tokens += batch.token_ids[path].tolist()
            if path:
                subject.close_to(scored[node], subject.scratch(self.tokens))

        @precondition(lambda self: self.room() > 0)
        @rule(seed=SEEDS, rows=st.integers(1, 9))
        def score_in_vain(self, seed: int, rows: int):
            rng = np.random.default_rng(seed)
            subject.logits(self.cache, subject.random_batch(rng, min(rows, self.room())))

        @rule(keep=st.floats(0, 1))
        def truncate(self, keep: float):
            length = round(len(self.tokens) * keep)
            self.cache.truncate(length)
            del self.tokens[length:]

        @precondition(lambda self: self.room() > 0)
        @rule(token=st.integers(0, 9))
        def equals_recomputing(self, token: int):
            assert self.cache.length == len(self.tokens)
            row = subject.logits(self.cache, TokenBatch.chain([token]))[0]
            subject.close_to(row, subject.scratch([*self.tokens, token]))

    return CacheMachine


def test_cache_equals_recomputing_from_scratch(subject):
    run_state_machine_as_test(
        machine(subject),
        settings=settings(max_examples=10, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)),
    )
