from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome


@dataclass(frozen=True, slots=True)
class Offer:
    """What a drafter knows, before any engine works, of what it would propose now.

    Offers of one drafter with the same `confidence` are alike in how much of them is accepted; the higher the level, the more.
    """

    drafter: str
    tokens: int | None = None  # nodes it would propose if allowed; None: as many as are asked for, as far as it knows
    confidence: int = 0
    expected: float | None = None  # share of guesses of this level that are usually accepted, where the drafter knows; a prior only
    ahead: bool = False  # whether it can draft ahead while the target verifies
    ready: int = 0  # nodes of it that were drafted ahead and cost nothing any more


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of the guess that an offer stood for, whether or not the drafter was asked for it.

    The tokens that came out are the target's own, so how often a guess agrees with them is how often it would be accepted.
    """

    drafter: str
    confidence: int  # of the offer
    tested: int  # guesses that were compared with the tokens that came out
    right: int  # of which so many agreed before the first that did not


class Drafter(Protocol):
    """Guesses; never decides. Owns its own cache and keeps it in step through `observe`."""

    @property
    def name(self) -> str: ...

    @property
    def engine_ms(self) -> float:
        """Wall time spent inside engine calls so far, ever growing; 0 for drafters without a model."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether `observe` needs the target's hidden states."""
        ...

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        """A new answer begins after these tokens. Called again for every answer; may reuse what it has already read."""
        ...

    def offer(self, max_tokens: int) -> Offer:
        """What `propose(max_tokens, …)` would come to. Costs no engine call and changes nothing."""
        ...

    def next_entropy(self) -> float | None:
        """Entropy in nats of the law the first guess would be drawn from, or None if there is no such law (fixed guesses).

        Asked only when the policy `wants_entropy`; work done here is kept for the `propose` that follows.
        """
        ...

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        """At most `max_tokens` nodes; fewer, or none, is always allowed."""
        ...

    def observe(self, outcome: Outcome) -> Trial | None:
        """A round has ended. Returns what became of the last offer, where that is known without asking anything of an engine."""
        ...

    def close(self) -> None: ...
