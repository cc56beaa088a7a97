"""Run the loop on toy parts and look at what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.drafter import Drafter
from edgespec.core.plan import Knobs, Plan
from edgespec.core.sampling import Sampling, SamplingState
from edgespec.core.verifier import Verifier
from edgespec.drafting.pool import Pool
from edgespec.orchestrator.loop import Parts, Round, decode, prefill
from edgespec.verification.greedy import GreedyVerifier


@dataclass(frozen=True)
class Always:
    """The simplest policy: always the same number, and ahead if the drafter can."""

    draft_tokens: int
    name: str = "always"
    wants_entropy: bool = False

    def __call__(self, history, state, profile, knobs) -> Plan:  # type: ignore[no-untyped-def]
        return Plan(self.draft_tokens, "always", ahead=1)


def parts_for(
    target,  # type: ignore[no-untyped-def]
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    k: int,
    sampling: Sampling | None = None,
    verify: Verifier | None = None,
    seed: int = 0,
    capacity: int | None = None,
) -> Parts:
    sampling = sampling or Sampling()
    pool = Pool(drafter)
    pool.start(prompt, sampling=sampling)
    return Parts(
        target=target,
        cache=target.new_cache(capacity or target.spec.max_context),
        drafters=pool,
        verify=verify or GreedyVerifier(),
        policy=Always(k),
        state=SamplingState.after(sampling, prompt),
        target_rng=np.random.default_rng([seed, 0]),
        draft_rng=np.random.default_rng([seed, 1]),
        knobs=Knobs(max_draft_tokens=64),
    )


def run_rounds(target, drafter: Drafter, prompt: Sequence[int], *, n: int, k: int, stop_ids: Sequence[int] = (), **options) -> list[Round]:  # type: ignore[no-untyped-def]
    parts = parts_for(target, drafter, prompt, k=k, **options)
    prefill(parts, prompt)
    known = list(prompt)
    rounds: list[Round] = []
    for round in decode(parts, prompt[-1], max_tokens=n, stop_ids=frozenset(stop_ids)):
        assert round.trace.context_len == len(known) - 1
        assert round.trace.kept <= round.trace.drafted
        assert round.trace.kept < round.trace.emitted == len(round.token_ids) == len(round.origins)
        known += round.token_ids
        rounds.append(round)
        tokens = getattr(parts.cache, "tokens", None)
        if tokens is not None:
            assert tokens == known[:-1], "the cache must hold everything but the last token"
    return rounds


def run_ids(target, drafter: Drafter, prompt: Sequence[int], **options) -> list[int]:  # type: ignore[no-untyped-def]
    return [token for round in run_rounds(target, drafter, prompt, **options) for token in round.token_ids]
