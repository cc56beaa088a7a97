"""Drafters that know the right answer and spoil it, so that every length of acceptance happens on real models too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Drafter, Offer
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome


class SpoilingDrafter:
    """Guesses the known continuation, wrong from a random place on; as a tree, with wrong siblings around the right path.

    `answers` maps a prompt to its plain continuation. Without one, every guess is noise.
    """

    engine_ms = 0.0
    wants_features = False

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], vocab_size: int, *, tree: bool = False) -> None:
        self.answers, self.vocab_size, self.tree = answers, vocab_size, tree
        self.name = "spoiling-tree" if tree else "spoiling"
        self.known: list[int] = []
        self.answer: Sequence[int] = ()
        self.prompt_len = 0

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self.known = list(prompt_ids)
        self.prompt_len = len(self.known)
        self.answer = self.answers.get(tuple(prompt_ids), ())

    def offer(self, max_tokens: int) -> Offer:
        return Offer(self.name)

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        said = len(self.known) - self.prompt_len
        right = list(self.answer[said : said + max_tokens])
        n = int(rng.integers(0, max_tokens + 1))
        good = int(rng.integers(0, n + 1))
        tokens, parents = list[int](), list[int]()
        last = -1  # end of the right path so far
        depth = 0
        for i in range(n):
            noise = int(rng.integers(0, self.vocab_size))
            if self.tree and rng.random() < 0.5:
                tokens.append(noise)  # a wrong sibling, somewhere
                parents.append(int(rng.integers(-1, i)) if i else -1)
            elif depth < min(good, len(right)):
                tokens.append(right[depth])
                parents.append(last)
                last, depth = i, depth + 1
            else:
                tokens.append(noise)
                parents.append(i - 1)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), len(self.known), source=self.name)

    def observe(self, outcome: Outcome) -> None:
        self.known += outcome.verdict.tokens(outcome.draft)

    def close(self) -> None:
        pass


class WrongEverySecondRound:
    """Another drafter's chains, every token of them wrong in every second round: a rewind after each good block."""

    name, engine_ms, wants_features = "wrong-half", 0.0, False

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner, self.vocab_size, self.rounds = inner, vocab_size, 0

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self.inner.start(prompt_ids, sampling=sampling, cancel=cancel)

    def offer(self, max_tokens: int) -> Offer:
        return Offer(self.name)

    def next_entropy(self) -> float | None:
        return None

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        draft = self.inner.propose(max_tokens, rng)
        self.rounds += 1
        if self.rounds % 2:
            return draft
        return Draft.chain((draft.token_ids + 1) % self.vocab_size, context_len=draft.context_len, source=self.name)

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)

    def close(self) -> None:
        self.inner.close()
