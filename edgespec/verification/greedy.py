from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.core.draft import ROOT, Draft
from edgespec.core.sampling import SamplingState
from edgespec.core.scores import Logits
from edgespec.core.verdict import Verdict
from edgespec.verification.judge import check_numbers, child_with, closing


@dataclass(frozen=True, slots=True)
class GreedyVerifier:
    """Follow the draft while it names the target's own argmax, after penalties and bias. Of equal logits the lowest id."""

    name: str = "greedy"
    lossless: bool = True

    def __call__(self, draft: Draft, logits: Logits, state: SamplingState, rng: np.random.Generator) -> Verdict:
        best = None if state.sampling.adjusts else logits.argmax()
        node, kept, path = ROOT, list[int](), list[int]()
        while True:
            row = logits.row(node + 1)
            token = int(best[node + 1]) if best is not None else state.best(row, path)
            check_numbers(row[token])
            child = child_with(draft, draft.children(node), token)
            if child is None:
                return closing(draft, node, kept, token)
            kept.append(child)
            path.append(token)
            node = child
