"""The main loop: plan, draft, score, judge, commit, observe, emit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.chunk import Finish, Origin, TokenLogProb
from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.draft import Draft
from edgespec.core.drafter import Offer
from edgespec.core.engine import Cache, Engine, TokenBatch
from edgespec.core.errors import ContractError
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import Policy, RoundState
from edgespec.core.sampling import SamplingState, log_softmax
from edgespec.core.scores import Logits
from edgespec.core.trace import RoundTrace
from edgespec.core.verdict import Kind, Outcome, Verdict
from edgespec.core.verifier import Verifier
from edgespec.drafting.pool import Pool

_ORIGIN: dict[Kind, Origin] = {"correction": "corrected", "bonus": "bonus", "plain": "plain", "stop": "drafted"}
PREFILL_ROWS = 256  # prompt tokens per forward pass: progress and cancelling between them

Progress = Callable[[int, int], None]  # (prompt tokens read, prompt tokens in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a round is made of. `target_rng` decides, `draft_rng` guesses: guesses never consume the target's randomness."""

    target: Engine
    cache: Cache
    drafters: Pool
    verify: Verifier
    policy: Policy
    state: SamplingState
    target_rng: np.random.Generator
    draft_rng: np.random.Generator
    knobs: Knobs = field(default_factory=Knobs)
    profile: DeviceProfile = field(default_factory=DeviceProfile.generic)
    power: Callable[[], PowerThermalState | None] = lambda: None
    meter_mj: Callable[[], float] | None = None  # energy used so far, ever growing
    cancel: CancelToken = field(default_factory=CancelToken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The tokens of one round, where each came from, and the evidence."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish: Finish | None
    trace: RoundTrace
    logprobs: tuple[TokenLogProb, ...] = ()


def prefill(parts: Parts, prompt: Sequence[int], progress: Progress | None = None) -> None:
    """Read all of the prompt but its last token, after whatever prefix the cache already holds."""
    cache, end = parts.cache, len(prompt) - 1
    while cache.length < end:
        parts.cancel.check()
        unread = prompt[cache.length : min(cache.length + PREFILL_ROWS, end)]
        parts.target.forward([(TokenBatch.chain(unread, scored=0), cache)], cancel=parts.cancel)
        cache.commit(range(len(unread)))
        if progress is not None:
            progress(cache.length + 1, len(prompt))


def decode(parts: Parts, last: int, *, max_tokens: int, stop_ids: Set[int], history: list[RoundTrace] | None = None) -> Iterator[Round]:
    """Yield rounds until a stop id, `max_tokens`, or a cancel (which raises Cancelled with everything committed so far intact).

    `last` is the one known token the target has not read; between rounds the cache holds every other. `history` is what the policy
    plans from; it may hold earlier answers' rounds, and this answer's are appended.
    """
    history = [] if history is None else history
    remaining = max_tokens
    for number in count():
        parts.cancel.check()
        metered = parts.meter_mj() if parts.meter_mj else 0.0
        began = perf_counter()
        plan, draft, timing = _guess(parts, history, room=remaining - 1)
        planned_at = perf_counter()

        copied = parts.cache.host_bytes_copied
        batch = TokenBatch.rooted(last, draft)
        (scores,) = parts.target.forward([(batch, parts.cache)], features=parts.drafters.wants_features, cancel=parts.cancel)
        scored_at = perf_counter()

        verdict = parts.verify(draft, scores.logits, parts.state, parts.target_rng).until(stop_ids, draft)
        tokens = verdict.tokens(draft)
        logprobs = _logprobs(scores.logits, verdict, tokens, parts.state.sampling.logprobs)
        judged_at = perf_counter()

        context_len = parts.cache.length
        parts.cache.commit([0, *(node + 1 for node in verdict.kept)])
        parts.state.extend(tokens)
        trials = parts.drafters.observe(Outcome(draft=draft, verdict=verdict, features=scores.features))
        ended = perf_counter()

        last = tokens[-1]
        remaining -= len(tokens)
        finish: Finish | None = "stop" if last in stop_ids else "length" if remaining == 0 else None
        history.append(
            RoundTrace(
                round=number,
                context_len=context_len,
                drafter=draft.source,
                planned=plan.draft_tokens,
                drafted=len(draft),
                kept=len(verdict.kept),
                emitted=len(tokens),
                rows=len(batch),
                ahead=plan.ahead if timing.ahead else 0,
                predrafted=timing.predrafted,
                plan_ms=timing.plan_ms,
                draft_ms=timing.draft_ms,
                offer_ms=timing.offer_ms,
                draft_engine_ms=timing.engine_ms,
                verify_ms=(scored_at - planned_at) * 1e3,
                judge_ms=(judged_at - scored_at) * 1e3,
                commit_ms=(ended - judged_at) * 1e3,
                round_ms=(ended - began) * 1e3,
                host_bytes_copied=parts.cache.host_bytes_copied - copied,
                entropy_nats=timing.entropy_nats,
                energy_mj=parts.meter_mj() - metered if parts.meter_mj else None,
                thermal=timing.power.thermal if timing.power else None,
                temperature_c=timing.power.temperature_c if timing.power else None,
                reason=plan.reason,
                offers=timing.offers,
                trials=trials,
                faults=parts.drafters.faults(),
            )
        )
        yield Round(token_ids=tuple(tokens), origins=_origins(verdict), finish=finish, trace=history[-1], logprobs=logprobs)
        if finish is not None:
            return
        if plan.pause_ms > 0:
            parts.cancel.rest(plan.pause_ms / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    plan_ms: float
    draft_ms: float
    offer_ms: float
    engine_ms: float
    entropy_nats: float | None
    power: PowerThermalState | None
    offers: tuple[Offer, ...]
    ahead: bool  # the drafter works on while the target verifies
    predrafted: int


def _guess(parts: Parts, history: Sequence[RoundTrace], *, room: int) -> tuple[Plan, Draft, _Timing]:
    """Ask the policy how much, then the drafter what. Nothing is drafted that could not be delivered."""
    drafters = parts.drafters
    began, engine_ms = perf_counter(), drafters.engine_ms
    entropy = drafters.next_entropy() if parts.policy.wants_entropy and room > 0 else None
    offering_at = perf_counter()
    offers = drafters.offers(min(room, parts.knobs.max_draft_tokens))
    asked_at = perf_counter()
    known = parts.cache.length + 1
    power = parts.power()
    state = RoundState(
        context_len=known,
        room=room,
        drafter=drafters.name,
        offers=offers,
        draft_entropy=entropy,
        power=power,
        units=(parts.target.capabilities.unit,),
    )
    plan = parts.policy(history, state, parts.profile, parts.knobs)
    planned_at = perf_counter()
    allowed = max(0, min(plan.draft_tokens, room, parts.knobs.max_draft_tokens, parts.target.capabilities.max_rows - 1))
    draft = drafters.propose(plan.drafter, allowed, parts.draft_rng)
    if draft.context_len != known:
        raise ContractError(f"{draft.source} drafted after {draft.context_len} tokens; {known} are known")
    if len(draft) > allowed:
        raise ContractError(f"{draft.source} drafted {len(draft)} nodes; {allowed} were allowed")
    later = min(allowed, room - len(draft) - 1)  # guesses that the next round can deliver if this one's are all kept
    ahead = plan.ahead > 0 and later > 0 and len(draft) > 0 and drafters.draft_ahead(draft, later, parts.draft_rng)
    ended = perf_counter()
    return (
        plan,
        draft,
        _Timing(
            plan_ms=(planned_at - asked_at) * 1e3,
            draft_ms=(ended - planned_at + asked_at - began) * 1e3,
            offer_ms=(asked_at - offering_at) * 1e3,
            engine_ms=drafters.engine_ms - engine_ms,
            entropy_nats=entropy,
            power=power,
            offers=offers,
            ahead=ahead,
            predrafted=min(len(draft), next((offer.ready for offer in offers if offer.drafter == draft.source), 0)),
        ),
    )


def _origins(verdict: Verdict) -> tuple[Origin, ...]:
    return ("drafted",) * len(verdict.kept) + (_ORIGIN[verdict.kind],)


def _logprobs(logits: Logits, verdict: Verdict, tokens: Sequence[int], top: int | None) -> tuple[TokenLogProb, ...]:
    """Every emitted token under the target, whether it was drafted or not: the row that judged it is its parent's."""
    if top is None:
        return ()
    out: list[TokenLogProb] = []
    for row, token in zip((0, *(node + 1 for node in verdict.kept)), tokens, strict=True):
        law = log_softmax(logits.row(row))
        best = np.argsort(-law, kind="stable")[:top]
        out.append(TokenLogProb(token, float(law[token]), tuple((int(i), float(law[i])) for i in best)))
    return tuple(out)
