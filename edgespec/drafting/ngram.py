"""Prompt lookup: what followed the last time these tokens stood here (Saxena 2023; Yang et al. 2023, arXiv:2304.04487)."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft, common_prefix
from edgespec.core.drafter import Offer, Trial
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
        self._offer = Offer(self.name, 0)  # the last one
        self._looked_at = -1  # length of the text at the last lookup …
        self._found: int | None = None  # … and what that found

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        if list(prompt_ids[: len(self._known)]) != self._known:
            self._known, self._behind, self._looked_at = [], {}, -1
        self._extend(prompt_ids[len(self._known) :])

    def offer(self, max_tokens: int) -> Offer:
        self._offer = Offer(self.name, 0)
        start = self._lookup()
        if start is not None:
            agreed = self._agreed(start, FROM[-1])
            level = bisect(FROM, agreed) - 1
            self._offer = Offer(self.name, min(max_tokens, int(TRUST * agreed)), level, EXPECTED[level])
        return self._offer

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        return Draft.chain(self._guess(max_tokens), context_len=len(self._known), source=self.name)

    def observe(self, outcome: Outcome) -> Trial | None:
        tokens = outcome.verdict.tokens(outcome.draft)
        trial = self._trial(tokens)
        self._extend(tokens)
        return trial

    def close(self) -> None:
        pass

    def _trial(self, tokens: Sequence[int]) -> Trial | None:
        tested = min(self._offer.tokens or 0, len(tokens))
        if not tested:
            return None
        return Trial(self.name, self._offer.confidence, tested, common_prefix(self._guess(tested), tokens))

    def _guess(self, max_tokens: int) -> list[int]:
        start, known = self._lookup(), self._known
        guess: list[int] = []
        if start is not None:
            for i in range(start, start + min(max_tokens, int(TRUST * self._agreed(start, max_tokens)))):
                guess.append(known[i] if i < len(known) else guess[i - len(known)])
        return guess

    def _lookup(self) -> int | None:
        """Index of the token that followed the longest known match."""
        known = self._known
        if self._looked_at != len(known):
            matches = (self._behind.get(tuple(known[-n:])) for n in self._sizes if n < len(known))
            self._looked_at, self._found = len(known), next((at for at in matches if at is not None), None)
        return self._found

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
