"""Records what the drafters of a runtime would have guessed along an answer that is known."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

import edgespec
from edgespec.core.draft import Draft, common_prefix
from edgespec.core.engine import Engine, TokenBatch
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome, Verdict
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec_apps.recording import LONGEST, RecordedAnswer, Recording, Track

if TYPE_CHECKING:
    from edgespec.orchestrator.runtime import Runtime

_SCORED_ROWS = 64  # per pass: a row of logits is as wide as the vocabulary


def record(
    runtime: Runtime,
    answers: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    *,
    recipe: str,
    max_tokens: int,
    max_context: int,
    command: str,
) -> Recording:
    """`answers`: (kind, prompt, greedy answer of at most `max_tokens`), as given in sessions of `max_context`."""
    model = {ModelDrafter.name: runtime.draft_engine.spec.name} if runtime.draft_engine is not None else {}
    return Recording(
        model=runtime.spec.name,
        recipe=recipe,
        drafts={**model, NgramDrafter.name: NgramDrafter.name},
        max_tokens=max_tokens,
        date=datetime.now(UTC).date().isoformat(),
        version=edgespec.__version__,
        command=command,
        answers=[record_answer(runtime, kind, prompt, answer, max_context=max_context) for kind, prompt, answer in answers],
    )


def record_answer(runtime: Runtime, kind: str, prompt: Sequence[int], answer: Sequence[int], *, max_context: int) -> RecordedAnswer:
    """Every drafter of the runtime along one answer: its draft model, if it has one, and n-grams in any case."""
    tracks = {NgramDrafter.name: ngram_track(prompt, answer)}
    if runtime.draft_engine is not None:
        tracks = {ModelDrafter.name: model_track(runtime.draft_engine, prompt, answer, max_context=max_context), **tracks}
    return RecordedAnswer(kind, len(prompt), len(answer), tracks)


def ngram_track(prompt: Sequence[int], answer: Sequence[int]) -> Track:
    """A real drafter, told one token after the other; its offers for `LONGEST` nodes."""
    drafter, rng = NgramDrafter(), np.random.default_rng(0)  # it draws nothing
    drafter.start(prompt, sampling=Sampling())
    right, offered, confidence = list[int](), list[int](), list[int]()
    for position, token in enumerate(answer):
        offer, draft = drafter.offer(LONGEST), drafter.propose(LONGEST, rng)
        right.append(common_prefix(draft.token_ids.tolist(), answer[position : position + LONGEST]))
        offered.append(len(draft))
        confidence.append(offer.confidence)
        drafter.observe(Outcome(draft=Draft.empty(context_len=draft.context_len), verdict=Verdict((), token, "plain")))
    return Track(right, offered, confidence)


def model_track(engine: Engine, prompt: Sequence[int], answer: Sequence[int], *, max_context: int) -> Track:
    """One reading of prompt and answer: a chain is right for as long as its guesses are, so guesses along the answer say all.

    Exact where the engine is width-invariant; elsewhere two close logits may change places.
    """
    capacity = min(max_context, engine.spec.max_context)
    guesses = _guesses(engine, [*prompt, *answer[:-1]][:capacity], len(prompt) - 1, capacity)
    hits = [guess == token for guess, token in zip(guesses, answer, strict=False)]
    right, run = list[int](), 0
    for position in reversed(range(len(answer))):
        run = run + 1 if position < len(hits) and hits[position] else 0
        right.append(min(run, LONGEST))
    offered = [max(0, min(LONGEST, capacity - len(prompt) - position + 1)) for position in range(len(answer))]
    return Track(right[::-1], None if min(offered) == LONGEST else offered)


def _guesses(engine: Engine, tokens: Sequence[int], first: int, capacity: int) -> list[int]:
    """The likeliest token after each of tokens[first:]."""
    cache, guesses = engine.new_cache(capacity), list[int]()
    for begin in range(0, len(tokens), _SCORED_ROWS):
        chunk = tokens[begin : begin + _SCORED_ROWS]
        scored = max(0, min(len(chunk), begin + len(chunk) - first))
        (scores,) = engine.forward([(TokenBatch.chain(chunk, scored=scored), cache)])
        if scored:
            guesses += scores.logits.argmax().tolist()
        cache.commit(range(len(chunk)))
    return guesses
