from __future__ import annotations

from typing import Protocol

import numpy as np

from edgespec.core.draft import Draft
from edgespec.core.sampling import SamplingState
from edgespec.core.scores import Logits
from edgespec.core.verdict import Verdict


class Verifier(Protocol):
    """Pure judgement. `logits` row 0 follows the last committed token; row i + 1 follows draft node i.

    `lossless`: the emitted tokens follow the target's law exactly, whatever the draft.
    """

    @property
    def name(self) -> str: ...
    @property
    def lossless(self) -> bool: ...
    def __call__(self, draft: Draft, logits: Logits, state: SamplingState, rng: np.random.Generator) -> Verdict: ...
