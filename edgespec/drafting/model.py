from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft, common_prefix
from edgespec.core.drafter import Offer
from edgespec.core.engine import Engine, TokenBatch
from edgespec.core.errors import DeviceError
from edgespec.core.sampling import Sampling, SamplingState, draw, log_softmax
from edgespec.core.scores import Float32, LogProbs
from edgespec.core.verdict import Outcome

_PREFILL_ROWS = 256

Guess = tuple[int, Float32 | None]  # a token, and the law [V] it was drawn from, or None for the likeliest


class Streak:
    """How a draft model is doing: right guesses beget right guesses, so their number in a row is its level of confidence.

    `FROM[n-1]` is where level n begins. `EXPECTED`: the share of guesses accepted at each level in the bundled
    recording, where a 0.5B model drafts for its 1.5B sister (`docs/experiments/simulated_scenes.py` prints it).
    """

    FROM = (0, 4, 8, 20)
    EXPECTED = (0.0, 0.77, 0.85, 0.94, 0.98)
    FORGOTTEN = 16  # tokens without a guess after which the streak says nothing any more

    def __init__(self) -> None:
        self._right = self._unasked = 0

    @property
    def level(self) -> int:
        return bisect(self.FROM, self._right)

    def guessed(self, drafted: int, kept: int) -> None:
        """A round of its own."""
        self._right = self._right + kept if kept == drafted else 0
        self._unasked = 0

    def passed(self, tokens: int) -> None:
        """Tokens came without its guessing."""
        self._unasked += tokens
        if self._unasked >= self.FORGOTTEN:
            self._right = 0


class ModelDrafter:
    """Draws a chain from a smaller engine with its own cache, through the same `normalise` as the target.

    The cache may run ahead of the answer by the guesses the engine has read; `observe` takes back what did not come true. When the
    engine's context is full it stops guessing, so the cost per round stays bounded.
    """

    name = "model"
    wants_features = False

    def __init__(self, engine: Engine, *, capacity: int | None = None) -> None:
        self._engine = engine
        self._cache = engine.new_cache(min(capacity or engine.spec.max_context, engine.spec.max_context))
        self._known: list[int] = []  # every token of the answer so far
        self._read: list[int] = []  # what the cache holds: the beginning of _known, or all of it and guesses behind
        self._next: Float32 | None = None  # logits [V] after all of _known, once asked for
        self._state = SamplingState(Sampling())
        self._cancel: CancelToken | None = None
        self._streak = Streak()
        self.engine_ms = 0.0

    @property
    def room(self) -> int:
        """Guesses that fit behind what is known: all of them but the last are fed."""
        return self._cache.capacity - len(self._known) + 1

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self._known = [int(t) for t in prompt_ids]
        self._keep(min(common_prefix(self._read, self._known), len(self._known) - 1))
        self._next = None
        self._state = SamplingState.after(sampling, self._known)
        self._cancel = cancel
        self._streak = Streak()

    def offer(self, max_tokens: int) -> Offer:
        room = max(0, self.room)
        level = self._streak.level
        return Offer(self.name, room if room < max_tokens else None, level, Streak.EXPECTED[level])

    def next_entropy(self) -> float | None:
        if self.room <= 0:
            return None
        logits = self._logits_after((), self._cancel)
        if not np.isfinite(logits.max()):
            return None
        law = log_softmax(logits) if self._state.sampling.greedy else self._state.law(logits)
        p = np.exp(law.astype(np.float64))
        return float(-(p[p > 0] * law[p > 0]).sum())

    def propose(self, max_tokens: int, rng: np.random.Generator, *, begun: Sequence[Guess] = ()) -> Draft:
        """`begun`: guesses that were made before, as `guess` gives them; the draft begins with them."""
        guesses = list(begun)
        while len(guesses) < min(max_tokens, self.room):
            guesses.append(self.guess([token for token, _ in guesses], rng))
        laws = [law for _, law in guesses if law is not None]
        q = LogProbs(np.stack(laws)) if laws else None
        return Draft.chain([token for token, _ in guesses], context_len=len(self._known), q=q, source=self.name)

    def guess(self, path: Sequence[int], rng: np.random.Generator | None, *, cancel: CancelToken | None = None) -> Guess:
        """What follows all that is known and then `path`: drawn by `rng`, or the likeliest (greedy sampling, or no `rng`).

        `cancel` stands in for the answer's own. Only what is read changes, so any path may be tried without taking it back.
        """
        logits = self._logits_after(path, cancel or self._cancel)
        if not np.isfinite(logits.max()):
            raise DeviceError("the draft model's logits are not numbers")  # it must not poison the judge
        if rng is None or self._state.sampling.greedy:
            return self._state.best(logits, path), None
        law = self._state.law(logits, path)
        return draw(np.exp(law.astype(np.float64)), rng), law

    def observe(self, outcome: Outcome) -> None:
        tokens = outcome.verdict.tokens(outcome.draft)
        n_known = len(self._known)
        self._known += tokens
        self._state.extend(tokens)
        self._next = None
        if len(outcome.draft) and outcome.draft.source == self.name:
            self._streak.guessed(len(outcome.draft), len(outcome.verdict.kept))
        else:
            self._streak.passed(len(tokens))
        agreed = common_prefix(self._read[n_known:], tokens)  # guesses that were read stand behind the n_known tokens
        if agreed < len(tokens):
            self._keep(n_known + agreed)

    def close(self) -> None:
        self._known, self._read = [], []
        self._cache.truncate(0)

    def _logits_after(self, path: Sequence[int], cancel: CancelToken | None) -> Float32:
        """Logits [V] after all that is known and then `path`; reads what of both is not in the cache yet."""
        n_known = len(self._known)
        if not path and self._next is not None:
            return self._next
        agreed = n_known + common_prefix(self._read[n_known:], path)
        if len(self._read) > (kept := min(agreed, n_known + len(path) - 1)):
            self._keep(kept)
        unread = [*self._known[len(self._read) :], *path[max(0, len(self._read) - n_known) :]]
        while len(unread) > _PREFILL_ROWS:
            self._forward(unread[:_PREFILL_ROWS], cancel, scored=0)
            unread = unread[_PREFILL_ROWS:]
        logits = self._forward(unread, cancel)
        if not path:
            self._next = logits
        return logits

    def _forward(self, token_ids: Sequence[int], cancel: CancelToken | None, *, scored: int = 1) -> Float32:
        """Read and keep these tokens; logits [V] after the last one (empty when none are scored)."""
        began = perf_counter()
        (scores,) = self._engine.forward([(TokenBatch.chain(token_ids, scored=scored), self._cache)], cancel=cancel)
        self._cache.commit(range(len(token_ids)))
        self._read += token_ids
        row = np.array(scores.logits.row(0)) if scored else np.empty(0, np.float32)
        self.engine_ms += (perf_counter() - began) * 1e3
        return row

    def _keep(self, length: int) -> None:
        del self._read[length:]
        self._cache.truncate(len(self._read))  # an interrupt may have left it longer than what is recorded
