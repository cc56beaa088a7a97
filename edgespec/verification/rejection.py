from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.core.draft import ROOT, Draft
from edgespec.core.errors import ContractError
from edgespec.core.sampling import SamplingState, draw
from edgespec.core.scores import Float64, Logits, LogProbs
from edgespec.core.verdict import Verdict
from edgespec.verification.judge import closing, target_law
from edgespec.verification.match import MatchVerifier

_ROUNDING = 1e-9  # residual mass below this means p = q up to rounding (never divide by it)
_fixed_guesses = MatchVerifier()


@dataclass(frozen=True, slots=True)
class RejectionVerifier:
    """Speculative sampling: accept a guess x with probability min(1, p(x)/q(x)), else continue with what it left of the target's law.

    Chains: Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1). Trees: recursive rejection over siblings (SpecInfer,
    arXiv:2305.09781, algorithm 2); siblings are drawn independently from one law, or without replacement when each node's q
    is the law left to it. Fixed guesses (q None) are the special case of a point mass, where matching the target's own draw
    accepts exactly as often.
    """

    name: str = "rejection"
    lossless: bool = True

    def __call__(self, draft: Draft, logits: Logits, state: SamplingState, rng: np.random.Generator) -> Verdict:
        if draft.q is None:
            return _fixed_guesses(draft, logits, state, rng)
        node, kept, path = ROOT, list[int](), list[int]()
        while True:
            p = target_law(logits, node, state, path)
            child, rest = _first_accepted(draft, draft.q, draft.children(node), p, rng)
            if child is None:
                return closing(draft, node, kept, draw(rest, rng))
            kept.append(child)
            path.append(int(draft.token_ids[child]))
            node = child


def _first_accepted(
    draft: Draft, q_laws: LogProbs, children: list[int], p: Float64, rng: np.random.Generator
) -> tuple[int | None, Float64]:
    """The first sibling that survives its test, or None and the residual law [V] to draw the correction from."""
    for child in children:
        token = int(draft.token_ids[child])
        q = q_laws.dense(child, len(p))
        if not q[token] > 0:
            raise ContractError(f"{draft.source or 'the drafter'} guessed token {token} but says its law gives it probability {q[token]}")
        if rng.random() * q[token] < p[token]:
            return child, p
        residual = np.maximum(p - q, 0.0)
        mass = residual.sum()
        if mass < _ROUNDING:
            return child, p
        p = residual / mass
    return None, p
