"""Prompt lookup: what followed the last time these tokens stood here (Saxena 2023; Yang et al. 2023, arXiv:2304.04487)."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Offer
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome

TRUST = 1.5  # guessed tokens per token of agreement behind them; docs/log.md says how it was found
# Level n of confidence begins where FROM[n] tokens agree; EXPECTED is the share of guesses accepted at each level in the bundled
# recording (`docs/experiments/simulated_scenes.py` prints it).
FROM = (0, 1, 2, 4, 8, 24)
EXPECTED = (0.0, 0.3, 0.64, 0.81, 0.93, 0.99)


class NgramDrafter:
    """Looks up the longest of the last `max_n` … `min_n` tokens that occurred before, latest occurrence first.

    The longer the past agrees, the further it is followed: a guess is at most `TRUST` times as long as the agreement, so a chance
    match of one token risks one row and a copied passage runs at full length. An index from n-gram to the position behind its last
    occurrence makes a lookup cost `max_n` dictionary reads, however long the context. A guess that runs past the end of the context
    goes on inside itself, so periodic text is continued.
    """

    name = "ngram"
    engine_ms = 0.0
    wants_features = False

    def __init__(self, *, min_n: int = 1, max_n: int = 8) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram sizes need 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self._sizes = range(max_n, min_n - 1, -1)
        self._known: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it last

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        if list(prompt_ids[: len(self._known)]) != self._known:
            self._known, self._behind = [], {}
        self._extend(prompt_ids[len(self._known) :])

    def offer(self, max_tokens: int) -> Offer:
        start = self._lookup()
        if start is None:
            return Offer(self.name, 0)
        agreed = self._agreed(start, FROM[-1])
        level = bisect(FROM, agreed) - 1
        return Offer(self.name, min(max_tokens, int(TRUST * agreed)), level, EXPECTED[level])

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        guess: list[int] = []
        start = self._lookup()
        if start is not None:
            known = self._known
            for i in range(start, start + min(max_tokens, int(TRUST * self._agreed(start, max_tokens)))):
                guess.append(known[i] if i < len(known) else guess[i - len(known)])
        return Draft.chain(guess, context_len=len(self._known), source=self.name)

    def observe(self, outcome: Outcome) -> None:
        self._extend(outcome.verdict.tokens(outcome.draft))

    def close(self) -> None:
        pass

    def _lookup(self) -> int | None:
        """Index of the token that followed the longest known match."""
        known = self._known
        for n in self._sizes:
            if n < len(known) and (at := self._behind.get(tuple(known[-n:]))) is not None:
                return at
        return None

    def _agreed(self, start: int, enough: int) -> int:
        """Tokens before `start` that agree with the last ones; counting stops at `enough`."""
        known, agreed = self._known, 0
        while agreed < start and agreed < enough and known[start - 1 - agreed] == known[-1 - agreed]:
            agreed += 1
        return agreed

    def _extend(self, token_ids: Sequence[int]) -> None:
        known = self._known
        for token in token_ids:
            for n in self._sizes:
                if n <= len(known):
                    self._behind[tuple(known[-n:])] = len(known)
            known.append(int(token))
