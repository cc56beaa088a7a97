from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Drafter, Offer, Trial
from edgespec.core.errors import Cancelled, ContractError
from edgespec.core.plan import Knobs, Plan
from edgespec.core.sampling import Sampling, SamplingState
from edgespec.core.verdict import Outcome, Verdict
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.drafting.pool import FIRST_REST, Pool
from edgespec.orchestrator.loop import Parts, Round, decode, prefill
from edgespec.verification.greedy import GreedyVerifier
from tests.helpers.toyloop import run_ids
from tests.helpers.toys import ToyEngine, toy_draft, toy_lm

PROMPT = [1, 2, 3, 1, 2]


class Fragile:
    """A drafter that fails when told to, and otherwise passes everything on."""

    def __init__(self, inner: Drafter, fails: Callable[[str, int], Exception | None]) -> None:
        self.inner, self.fails, self.calls = inner, fails, dict[str, int]()
        self.name, self.wants_features = inner.name, inner.wants_features

    def _count(self, verb: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if (error := self.fails(verb, self.calls[verb])) is not None:
            raise error

    @property
    def engine_ms(self) -> float:
        return self.inner.engine_ms

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self._count("start")
        self.inner.start(prompt_ids, sampling=sampling, cancel=cancel)

    def offer(self, max_tokens: int) -> Offer:
        self._count("offer")
        return self.inner.offer(max_tokens)

    def next_entropy(self) -> float | None:
        self._count("next_entropy")
        return self.inner.next_entropy()

    def propose(self, max_tokens: int, rng: np.random.Generator) -> Draft:
        self._count("propose")
        return self.inner.propose(max_tokens, rng)

    def observe(self, outcome: Outcome) -> Trial | None:
        self._count("observe")
        return self.inner.observe(outcome)

    def close(self) -> None:
        self._count("close")
        self.inner.close()


class Turns:
    """A policy that asks the drafters in turn."""

    name, wants_entropy = "turns", True

    def __init__(self, *names: str, draft_tokens: int = 3) -> None:
        self.names, self.draft_tokens = names, draft_tokens

    def __call__(self, history, state, profile, knobs) -> Plan:  # type: ignore[no-untyped-def]
        return Plan(self.draft_tokens, "in turn", drafter=self.names[len(history) % len(self.names)])


def rounds_of(pool: Pool, policy: Turns, *, n: int = 40, target: ToyEngine | None = None) -> list[Round]:
    target = target or toy_lm(3)
    pool.start(PROMPT, sampling=Sampling())
    rng = np.random.default_rng(0)
    parts = Parts(
        target=target,
        cache=target.new_cache(256),
        drafters=pool,
        verify=GreedyVerifier(),
        policy=policy,
        state=SamplingState.after(Sampling(), PROMPT),
        target_rng=rng,
        draft_rng=rng,
        knobs=Knobs(),
    )
    prefill(parts, PROMPT)
    return list(decode(parts, PROMPT[-1], max_tokens=n, stop_ids=frozenset()))


def ids(rounds: Sequence[Round]) -> list[int]:
    return [token for round in rounds for token in round.token_ids]


PLAIN = run_ids(toy_lm(3), NoDrafter(), PROMPT, n=40, k=0)


def test_drafters_that_take_turns_stay_in_step() -> None:
    draft = toy_lm(3)  # its guesses are always right, so a draft model that is out of step would show
    rounds = rounds_of(Pool(ModelDrafter(draft), NgramDrafter()), Turns("model", "ngram"))
    assert ids(rounds) == PLAIN
    assert {r.trace.drafter for r in rounds} == {"model", "ngram"}
    asked = [r.trace for r in rounds[:-1] if r.trace.drafter == "model"]
    assert asked and all(t.kept == t.drafted > 0 for t in asked)
    assert draft.rows < 2 * (len(PROMPT) + 40), "what both have read is read once"
    assert {offer.drafter for offer in rounds[0].trace.offers} == {"model", "ngram"}


def test_a_round_tells_what_became_of_guesses_that_nobody_asked_for() -> None:
    rounds = rounds_of(Pool(ModelDrafter(toy_lm(3)), NgramDrafter()), Turns("model", "ngram"))
    tried = [(r.trace, trial) for r in rounds for trial in r.trace.trials]
    assert {trace.drafter for trace, _ in tried} == {"model", "ngram"} and {trial.drafter for _, trial in tried} == {"ngram"}
    for trace, trial in tried:
        offer = next(offer for offer in trace.offers if offer.drafter == "ngram")
        assert trial.confidence == offer.confidence and 0 < trial.tested <= min(offer.tokens or 0, trace.emitted)
        assert 0 <= trial.right <= trial.tested
        if trace.drafter == "ngram":
            assert trial.right == trace.kept or (trace.kept == trace.drafted and trial.right == trace.kept + 1)


@pytest.mark.parametrize("verb", ["start", "offer", "next_entropy", "propose", "observe"])
def test_a_failing_drafter_never_ends_an_answer(verb: str) -> None:
    """It fails once, rests, is started anew with all that is known, and guesses again."""
    when = (verb, 1 if verb == "start" else 2)
    drafter = Fragile(ModelDrafter(toy_lm(3)), lambda at, n: RuntimeError("driver gone") if (at, n) == when else None)
    rounds = rounds_of(Pool(drafter), Turns(""))
    assert ids(rounds) == PLAIN
    faults = [fault for r in rounds for fault in r.trace.faults]
    assert len(faults) == 1 and "driver gone" in faults[0] and "model" in faults[0]
    failed = next(i for i, r in enumerate(rounds) if r.trace.faults)
    resting = rounds[failed + 1 : failed + FIRST_REST - 1]
    assert resting and all(r.trace.drafted == 0 and r.trace.offers == () for r in resting)
    back = [r.trace for r in rounds[failed + FIRST_REST + 1 : -1]]
    assert back and all(t.kept == t.drafted > 0 for t in back), "back in step"


def test_the_others_go_on_without_it() -> None:
    drafter = Fragile(ModelDrafter(toy_lm(3)), lambda at, n: RuntimeError("gone for good") if at == "propose" else None)
    rounds = rounds_of(Pool(drafter, NgramDrafter()), Turns(""))
    assert ids(rounds) == PLAIN
    assert {offer.drafter for r in rounds[1:FIRST_REST] for offer in r.trace.offers} == {"ngram"}
    assert "ngram" in {r.trace.drafter for r in rounds}


def test_every_failure_in_a_row_doubles_the_rest() -> None:
    drafter = Fragile(ModelDrafter(toy_draft(3)), lambda at, n: RuntimeError("no") if at == "propose" else None)
    rounds = rounds_of(Pool(drafter), Turns(""), n=120)
    failed = [i for i, r in enumerate(rounds) if r.trace.faults]
    gaps = np.diff(failed)
    assert len(gaps) >= 3 and all(b > 1.5 * a for a, b in itertools.pairwise(gaps))


@pytest.mark.parametrize("error", [Cancelled("stop"), ContractError("a bug")])
def test_cancelling_and_bugs_pass_through(error: Exception) -> None:
    pool = Pool(Fragile(NgramDrafter(), lambda at, n: error if at == "observe" else None))
    with pytest.raises(type(error)):
        rounds_of(pool, Turns(""))


def test_numbers_that_are_none_count_as_a_failure() -> None:
    draft = toy_lm(3)
    good, calls = draft.law, 0

    def law(tokens: list[int]) -> np.ndarray:
        nonlocal calls
        calls += 1
        return np.full(16, np.nan, np.float32) if calls == 5 else good(tokens)

    draft.law = law
    rounds = rounds_of(Pool(ModelDrafter(draft)), Turns(""))
    assert ids(rounds) == PLAIN
    assert [f for r in rounds for f in r.trace.faults] == ["model: DeviceError: the draft model's logits are not numbers"]
    assert rounds[-2].trace.kept > 0, "it came back"


def test_what_a_plan_may_name() -> None:
    with pytest.raises(ContractError, match="names the drafter 'stranger'; there are ngram, none"):
        rounds_of(Pool(NgramDrafter(), NoDrafter()), Turns("stranger"))
    with pytest.raises(ValueError, match="different names"):
        Pool(NgramDrafter(), NgramDrafter())
    with pytest.raises(ValueError, match="different names"):
        Pool()


def test_closing_reaches_everyone() -> None:
    first, second = (Fragile(d, lambda at, n: RuntimeError("no") if at == "close" else None) for d in (NgramDrafter(), NoDrafter()))
    Pool(first, second).close()
    assert first.calls["close"] == second.calls["close"] == 1


def test_an_outcome_of_another_drafter_is_observed_too() -> None:
    model = ModelDrafter(toy_draft(3))
    pool = Pool(model, NgramDrafter())
    pool.start(PROMPT, sampling=Sampling())
    draft = pool.propose("ngram", 2, np.random.default_rng(0))
    pool.observe(Outcome(draft=draft, verdict=Verdict((0,), 7, "correction")))
    assert pool.propose("model", 1, np.random.default_rng(0)).context_len == len(PROMPT) + 2


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.9), Sampling(temperature=1.1, top_k=5, repetition_penalty=1.3)])
def test_after_rounds_of_others_a_law_is_that_of_all_that_is_known(sampling: Sampling) -> None:
    """Rejection is exact only if the stated law is the one the guess was drawn from, with every token counted once."""
    pool, fresh = Pool(ModelDrafter(toy_draft(3)), NgramDrafter()), ModelDrafter(toy_draft(3))
    pool.start(PROMPT, sampling=sampling)
    known, rng = list(PROMPT), np.random.default_rng(0)
    for turn in range(6):
        draft = pool.propose("ngram" if turn % 2 else "model", 3, rng)
        verdict = Verdict(tuple(range(min(1, len(draft)))), 1 + turn % 3, "correction")
        known += verdict.tokens(draft)
        pool.observe(Outcome(draft=draft, verdict=verdict))
    fresh.start(known, sampling=sampling)
    ours, theirs = pool.propose("model", 3, np.random.default_rng(1)), fresh.propose(3, np.random.default_rng(1))
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.q is not None and theirs.q is not None
    for i in range(3):
        assert ours.q.dense(i, 16).tolist() == theirs.q.dense(i, 16).tolist()
