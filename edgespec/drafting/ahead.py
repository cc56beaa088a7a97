"""Draft ahead while the target verifies, on a thread of its own (PEARL, arXiv:2408.11850, drafts so on a second device).

One outcome is foreseen: every guess is kept and the target adds what the draft model itself finds likeliest. Guesses for the round
after it are made while the target verifies. If it comes true they are ready; if not, they are dropped and the drafter goes on from
what it had read before. Nothing depends on timing but the time: guesses, their laws and the use of randomness are what they would
be without, up to the rounding of an engine whose logits depend on how many rows it reads at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Offer
from edgespec.core.errors import Cancelled
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome
from edgespec.drafting.model import Guess, ModelDrafter

THREAD_NAME = "edgespec-ahead"

RandomState = Mapping[str, Any]  # of a bit generator


class _Errand:
    """Guesses for the round after the foreseen outcome. Made on the worker; while it runs, nobody else touches the drafter."""

    def __init__(self, drafter: ModelDrafter, draft: Draft, max_tokens: int, rng: np.random.Generator, cancel: CancelToken | None) -> None:
        self.cancel, self.done = CancelToken(), Future[None]()
        self.made: list[tuple[Guess, RandomState]] = []  # with the state of the randomness behind each
        self._drafter, self._max_tokens, self._rng, self._cancel = drafter, max_tokens, deepcopy(rng), cancel
        self._drafted = [int(token) for token in draft.token_ids]
        self._bonus: int | None = None  # foreseen
        self._tokens: list[int] | None = None  # what came true

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            with self._cancel.watch(self.cancel.cancel) if self._cancel is not None else nullcontext():
                self._guess()
        except BaseException as error:  # some libraries' panics too; the caller guards against exceptions only
            self.done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.done.set_result(None)

    def _guess(self) -> None:
        self._bonus, _ = self._drafter.guess(self._drafted, None, cancel=self.cancel)
        path = [*self._drafted, self._bonus]
        # `judged` sets the tokens before it reads the bonus: one of the two threads sees that they differ.
        while len(self.made) < self._max_tokens and self._agrees():
            guess = self._drafter.guess(path, self._rng, cancel=self.cancel)
            self.made.append((guess, self._rng.bit_generator.state))
            path.append(guess[0])

    def judged(self, tokens: list[int]) -> None:
        """What came true. Ends the work if that was not foreseen."""
        self._tokens = tokens
        if not self._agrees():
            self.cancel.cancel()

    def _agrees(self) -> bool:
        """Whether what came true is what was foreseen, as far as both are known."""
        if self._tokens is None:
            return True
        return self._tokens[:-1] == self._drafted and self._bonus in (None, self._tokens[-1])

    @property
    def came_true(self) -> bool:
        return self._tokens is not None and self._bonus is not None and self._agrees()

    def drop(self) -> None:
        """Returns when nothing runs any more: at once, or after the pass that runs if the engine cannot interrupt it."""
        self.cancel.cancel()
        if not self.done.cancel():  # an errand that an interrupt kept from being sent is never run
            self.done.exception()


class _Worker:
    """One daemon thread that runs errands; it ends when told to, or when this object is dropped."""

    def __init__(self) -> None:
        self._errands: SimpleQueue[_Errand | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._errands,), name=THREAD_NAME, daemon=True)
        self._dismiss = weakref.finalize(self, self._errands.put, None)
        self._thread.start()

    def send(self, errand: _Errand) -> None:
        self._errands.put(errand)

    def end(self) -> None:
        self._dismiss()
        self._thread.join()


def _serve(errands: SimpleQueue[_Errand | None]) -> None:
    while (errand := errands.get()) is not None:
        errand.run()
        del errand  # the drafter's engine and cache must not live on in an idle thread


class AheadDrafter:
    """A model drafter that can `draft_ahead`. Its thread starts with the first errand and ends with `close`, or with this object.

    `observe` returns at once; whatever is asked next waits for the errand, unless the outcome ended it. What an errand raised comes
    out there, with the drafter in step. `engine_ms` counts the waiting, not the work done beside the target.
    """

    def __init__(self, inner: ModelDrafter) -> None:
        self._inner = inner
        self._cancel: CancelToken | None = None
        self._worker: _Worker | None = None
        self._errand: _Errand | None = None
        self._outcome: Outcome | None = None  # observed while the errand ran
        self._ready: list[tuple[Guess, RandomState]] = []  # what may be proposed now
        self._aside_ms = 0.0  # engine time that nobody waited for
        self._sent_ms = 0.0  # `engine_ms` when the errand was sent

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def wants_features(self) -> bool:
        return self._inner.wants_features

    @property
    def engine_ms(self) -> float:
        return self._inner.engine_ms - self._aside_ms if self._errand is None else self._sent_ms

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self._drop()
        self._cancel = cancel
        self._inner.start(prompt_ids, sampling=sampling, cancel=cancel)

    def offer(self, max_tokens: int) -> Offer:
        self._settle()
        return replace(self._inner.offer(max_tokens), ahead=True, ready=len(self._ready))

    def next_entropy(self) -> float | None:
        self._settle()
        return self._inner.next_entropy()

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        self._settle()
        ready, self._ready = self._ready[:max_tokens], []
        guesses = [guess for guess, _ in ready]
        if ready and guesses[-1][1] is not None:
            rng.bit_generator.state = ready[-1][1]  # as if they had been drawn now
        return self._inner.propose(max_tokens, rng, begun=guesses)

    def draft_ahead(self, draft: Draft, max_tokens: int, rng: np.random.Generator) -> bool:
        """Begin on the round after the one in which `draft` is verified; False if no guess would fit.

        `max_tokens`: how many will be asked for. `rng`: what they would be drawn with then; it stays as it is until they are proposed.
        """
        self._settle()
        max_tokens = min(max_tokens, self._inner.room - len(draft) - 1)
        if max_tokens < 1:
            return False
        self._worker = self._worker or _Worker()
        self._sent_ms = self.engine_ms
        self._errand = _Errand(self._inner, draft, max_tokens, rng, self._cancel)
        self._worker.send(self._errand)
        return True

    def observe(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            self._settle()
        if self._errand is None:
            self._ready = []
            self._inner.observe(outcome)
        else:
            self._outcome = outcome
            self._errand.judged(outcome.verdict.tokens(outcome.draft))

    def close(self) -> None:
        self._drop()
        if self._worker is not None:
            self._worker.end()
            self._worker = None
        self._inner.close()

    def _settle(self) -> None:
        """Wait until nothing runs and the drafter is in step; what was foreseen is ready. Raises what the errand raised."""
        errand, outcome = self._errand, self._outcome
        if errand is None:
            return
        if outcome is None:  # nothing was verified in between
            self._drop()
            return
        began = perf_counter()
        error = errand.done.exception()
        self._forget(waited_ms=(perf_counter() - began) * 1e3)
        self._inner.observe(outcome)
        if error is not None and not isinstance(error, Cancelled):
            raise error
        self._ready = errand.made if errand.came_true else []

    def _drop(self) -> None:
        """Wait until nothing runs; whatever was made ahead is void."""
        self._ready = []
        if self._errand is not None:
            began = perf_counter()
            self._errand.drop()
            self._forget(waited_ms=(perf_counter() - began) * 1e3)

    def _forget(self, *, waited_ms: float) -> None:
        self._aside_ms = self._inner.engine_ms - self._sent_ms - waited_ms
        self._errand = self._outcome = None
