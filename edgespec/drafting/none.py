from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Offer
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome


class NoDrafter:
    """Never guesses: plain decoding through the same loop."""

    name = "none"
    engine_ms = 0.0
    wants_features = False

    def __init__(self) -> None:
        self._known = 0

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self._known = len(prompt_ids)

    def offer(self, max_tokens: int) -> Offer:
        return Offer(self.name, 0)

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        return Draft.empty(context_len=self._known, source=self.name)

    def observe(self, outcome: Outcome) -> None:
        self._known += len(outcome.verdict.kept) + 1

    def close(self) -> None:
        pass
