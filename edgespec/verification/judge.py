"""Steps that every verifier shares. Row 0 follows the last committed token; row node + 1 follows draft node `node`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.draft import ROOT, Draft
from edgespec.core.errors import DeviceError
from edgespec.core.sampling import SamplingState
from edgespec.core.scores import Float64, Logits
from edgespec.core.verdict import Kind, Verdict


def target_law(logits: Logits, node: int, state: SamplingState, path: Sequence[int]) -> Float64:
    """float64 [V]: the target's probabilities after `node`, whose path holds the tokens `path`. DeviceError if they are no numbers."""
    row = logits.row(node + 1)
    check_numbers(row.max())  # before the filters: they lose their way among what is no number
    p = np.exp(state.law(row, path).astype(np.float64))
    return p / p.sum()


def check_numbers(largest: np.float32) -> None:
    """DeviceError unless the largest of a row of logits is a number; of a row with NaN, NumPy's is NaN."""
    if not np.isfinite(largest):
        raise DeviceError("the target model produced logits that are not numbers; its weights or its device are damaged")


def child_with(draft: Draft, children: Sequence[int], token: int) -> int | None:
    """The first of these nodes that holds `token`."""
    return next((c for c in children if draft.token_ids[c] == token), None)


def closing(draft: Draft, node: int, kept: Sequence[int], token: int) -> Verdict:
    """The verdict whose last word is the target's own `token` after `node`."""
    kind: Kind = "correction" if draft.children(node) else "plain" if node == ROOT else "bonus"
    return Verdict(tuple(kept), token, kind)
