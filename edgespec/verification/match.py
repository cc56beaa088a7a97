from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.core.draft import ROOT, Draft
from edgespec.core.sampling import SamplingState, draw
from edgespec.core.scores import Logits
from edgespec.core.verdict import Verdict
from edgespec.verification.judge import child_with, closing, target_law


@dataclass(frozen=True, slots=True)
class MatchVerifier:
    """Draw every token from the target's law and keep the draft while it named the draw.

    Exact for any draft, whatever its q, because the emitted token is always the target's. One random number per emitted
    token, so the same seed gives the same text with any drafter or none. It accepts Σ p·q where rejection accepts
    Σ min(p, q); for fixed guesses the two are equal.
    """

    name: str = "match"
    lossless: bool = True

    def __call__(self, draft: Draft, logits: Logits, state: SamplingState, rng: np.random.Generator) -> Verdict:
        node, kept, path = ROOT, list[int](), list[int]()
        while True:
            token = draw(target_law(logits, node, state, path), rng)
            child = child_with(draft, draft.children(node), token)
            if child is None:
                return closing(draft, node, kept, token)
            kept.append(child)
            path.append(token)
            node = child
