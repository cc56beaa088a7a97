"""Drafting ahead changes when work is done and nothing else. Threads are ordered by events; no test waits for a clock."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.engine import Scores, TokenBatch
from edgespec.core.errors import Cancelled, DeviceError
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome, Verdict
from edgespec.drafting.ahead import THREAD_NAME, AheadDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.pool import FIRST_REST, Pool
from edgespec.orchestrator.loop import decode, prefill
from edgespec.verification.match import MatchVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.toyloop import parts_for, run_ids, run_rounds
from tests.helpers.toys import ToyCache, ToyEngine, toy_draft, toy_lm

VOCAB = 16
PROMPT = [1, 2, 3, 1, 2]
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_k=6), Sampling(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.2)]
PATIENCE_S = 20.0  # before a test that went wrong gives up


def workers() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    before = workers()
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(PATIENCE_S)
    assert workers() == before == 0


class Gated(ToyEngine):
    """Passes on a worker wait at a gate: `arrived` is set when one does, and each `let_through` lets one go on."""

    def __init__(self, inner: ToyEngine) -> None:
        super().__init__(inner.law, vocab_size=inner.spec.vocab_size, max_context=inner.spec.max_context)
        self.arrived, self._gate, self.fails = threading.Semaphore(0), threading.Semaphore(0), list[Exception]()

    def forward(
        self, work: Sequence[tuple[TokenBatch, ToyCache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        if threading.current_thread().name == THREAD_NAME:
            self.arrived.release()
            assert self._gate.acquire(timeout=PATIENCE_S)
            if self.fails:
                raise self.fails.pop()
        return super().forward(work, features=features, cancel=cancel)

    def wait_for_pass(self) -> None:
        assert self.arrived.acquire(timeout=PATIENCE_S)

    def let_through(self, passes: int = 1) -> None:
        self._gate.release(passes)


def all_kept(draft: Draft, bonus: int) -> Outcome:
    return Outcome(draft=draft, verdict=Verdict(tuple(range(len(draft))), bonus, "bonus"))


def refused(draft: Draft, kept: int = 0) -> Outcome:
    wrong = (int(draft.token_ids[kept]) + 1) % 15
    return Outcome(draft=draft, verdict=Verdict(tuple(range(kept)), wrong, "correction"))


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def likeliest(known: Sequence[int], draft: Draft) -> int:
    """What the draft model itself would put behind its guesses."""
    return int(toy_draft(3).law([*known, *draft.token_ids.tolist()]).argmax())


def begun(engine: ToyEngine | None = None, *, n: int = 3, later: int = 3) -> tuple[AheadDrafter, ToyEngine, Draft]:
    """A drafter that has proposed `n` guesses and is on its way to `later` more."""
    engine = engine or toy_draft(3)
    drafter = AheadDrafter(ModelDrafter(engine))
    drafter.start(PROMPT, sampling=Sampling())
    draft = drafter.propose(n, rng())
    assert drafter.draft_ahead(draft, later, rng())
    return drafter, engine, draft


def expected(known: Sequence[int], n: int) -> list[int]:
    drafter = ModelDrafter(toy_draft(3))
    drafter.start(known, sampling=Sampling())
    return drafter.propose(n, rng()).token_ids.tolist()


@settings(max_examples=60, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    max_context=st.sampled_from([24, 4096]),
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["kept", "some", "none", "foreseen"])), max_size=8),
    seed=st.integers(0, 99),
)
def test_guesses_laws_and_randomness_are_those_without_it(
    sampling: Sampling, max_context: int, rounds: list[tuple[int, int, str]], seed: int
) -> None:
    plain, ahead = ModelDrafter(toy_draft(3, max_context=max_context)), AheadDrafter(ModelDrafter(toy_draft(3, max_context=max_context)))
    one, other, known = np.random.default_rng(seed), np.random.default_rng(seed), list(PROMPT)
    for drafter in (plain, ahead):
        drafter.start(PROMPT, sampling=sampling)
    for allowed, later, kind in rounds:
        assert ahead.offer(allowed).tokens == plain.offer(allowed).tokens
        wanted, got = plain.propose(allowed, one), ahead.propose(allowed, other)
        assert got.token_ids.tolist() == wanted.token_ids.tolist() and got.context_len == wanted.context_len == len(known)
        assert (got.q is None) == (wanted.q is None)
        if got.q is not None and wanted.q is not None:
            np.testing.assert_array_equal(got.q.values, wanted.q.values)
        assert one.bit_generator.state == other.bit_generator.state
        ahead.draft_ahead(got, later, other)
        if kind == "foreseen":
            outcome = all_kept(got, likeliest(known, got))
        elif kind == "kept":
            outcome = all_kept(got, seed % 15)
        else:
            outcome = refused(got, len(got) // 2 if kind == "some" else 0) if len(got) else all_kept(got, seed % 15)
        known += outcome.verdict.tokens(got)
        for drafter in (plain, ahead):
            drafter.observe(outcome)
    ahead.close()


def test_what_was_foreseen_costs_no_pass_between_rounds() -> None:
    drafter, engine, draft = begun()
    outcome = all_kept(draft, likeliest(PROMPT, draft))
    drafter.observe(outcome)
    offer = drafter.offer(3)
    assert offer.ahead and offer.ready == 3
    passes = engine.forwards
    assert passes == 3 + 1 + 3  # the guesses, the token foreseen behind them, and the guesses behind that
    known = PROMPT + outcome.verdict.tokens(draft)
    assert drafter.propose(3, rng()).token_ids.tolist() == expected(known, 3)
    assert engine.forwards == passes
    assert drafter.propose(5, rng()).token_ids.tolist() == expected(known, 5), "it can be asked again"
    drafter.close()


def test_more_than_was_made_ahead_is_added_and_less_is_cut() -> None:
    for wanted, more in [(5, 2), (1, 0)]:
        drafter, engine, draft = begun()
        outcome = all_kept(draft, likeliest(PROMPT, draft))
        drafter.observe(outcome)
        drafter.offer(wanted)
        passes = engine.forwards
        assert drafter.propose(wanted, rng()).token_ids.tolist() == expected(PROMPT + outcome.verdict.tokens(draft), wanted)
        assert engine.forwards == passes + more
        drafter.close()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_was_not_foreseen_wastes_no_more_than_was_read_ahead(kept: int) -> None:
    drafter, engine, draft = begun()
    outcome = refused(draft, kept)
    drafter.observe(outcome)
    assert drafter.offer(3).ready == 0
    ahead = engine.rows - len(PROMPT) - 2
    assert ahead <= 2 + 3  # the last guess, the token foreseen, and all but one of the guesses behind
    assert drafter.propose(2, rng()).token_ids.tolist() == expected(PROMPT + outcome.verdict.tokens(draft), 2)
    assert engine.rows == len(PROMPT) + 2 + ahead + 2, "guesses that were kept are not read again"
    drafter.close()


def test_a_refusal_ends_the_work_after_the_pass_that_runs() -> None:
    engine = Gated(toy_draft(3))
    drafter, _, draft = begun(engine, later=9)
    engine.wait_for_pass()
    engine.let_through()
    engine.wait_for_pass()  # the foreseen token is known; its reading is under way
    passes = engine.forwards
    outcome = refused(draft, 1)
    drafter.observe(outcome)
    engine.let_through(99)
    assert drafter.offer(3).ready == 0
    assert engine.forwards <= passes + 1
    assert drafter.propose(3, rng()).token_ids.tolist() == expected(PROMPT + outcome.verdict.tokens(draft), 3)
    drafter.close()


@pytest.mark.parametrize("right", [True, False])
def test_an_outcome_may_come_before_its_guess(right: bool) -> None:
    """The target is done while the draft model still reads its own last guess."""
    engine = Gated(toy_draft(3))
    drafter, _, draft = begun(engine)
    engine.wait_for_pass()
    bonus = likeliest(PROMPT, draft)
    outcome = all_kept(draft, bonus if right else (bonus + 1) % 15)
    drafter.observe(outcome)
    engine.let_through(99)
    assert drafter.offer(3).ready == (3 if right else 0)
    assert engine.forwards == 3 + (4 if right else 1)
    assert drafter.propose(3, rng()).token_ids.tolist() == expected(PROMPT + outcome.verdict.tokens(draft), 3)
    drafter.close()


def test_observing_waits_for_nothing_and_engine_time_stands_still() -> None:
    engine = Gated(toy_draft(3))
    drafter, _, draft = begun(engine)
    before = drafter.engine_ms
    engine.wait_for_pass()
    engine.let_through(2)
    engine.wait_for_pass()
    engine.wait_for_pass()
    assert drafter.engine_ms == before
    drafter.observe(all_kept(draft, likeliest(PROMPT, draft)))  # the gate is closed: waiting would hang here
    engine.let_through(99)
    drafter.offer(3)
    assert drafter.engine_ms >= before
    drafter.close()


def test_an_error_comes_out_at_the_next_call_with_the_drafter_in_step() -> None:
    engine = Gated(toy_draft(3))
    drafter, _, draft = begun(engine)
    engine.fails.append(DeviceError("the driver is gone"))
    engine.let_through(99)
    outcome = all_kept(draft, 5)
    drafter.observe(outcome)
    with pytest.raises(DeviceError, match="the driver is gone"):
        drafter.offer(3)
    assert drafter.offer(3).ready == 0
    assert drafter.propose(3, rng()).token_ids.tolist() == expected(PROMPT + outcome.verdict.tokens(draft), 3)
    drafter.close()


def test_a_cancel_of_the_answer_ends_the_work() -> None:
    engine, cancel = Gated(toy_draft(3)), CancelToken()
    drafter = AheadDrafter(ModelDrafter(engine))
    drafter.start(PROMPT, sampling=Sampling(), cancel=cancel)
    draft = drafter.propose(3, rng())
    drafter.draft_ahead(draft, 9, rng())
    engine.wait_for_pass()
    passes = engine.forwards
    cancel.cancel()
    engine.let_through(99)
    outcome = all_kept(draft, likeliest(PROMPT, draft))
    drafter.observe(outcome)
    drafter.offer(3)
    assert engine.forwards <= passes + 1
    with pytest.raises(Cancelled):
        drafter.propose(3, rng())
    known = PROMPT + outcome.verdict.tokens(draft)
    drafter.start(known, sampling=Sampling())
    assert drafter.propose(3, rng()).token_ids.tolist() == expected(known, 3)
    drafter.close()


@pytest.mark.parametrize("sent", [True, False])
def test_an_interrupt_while_work_is_handed_over(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the worker got it or not, the next answer begins as if nothing had been."""
    from edgespec.drafting import ahead

    drafter = AheadDrafter(ModelDrafter(toy_draft(3)))
    drafter.start(PROMPT, sampling=Sampling())
    draft, send = drafter.propose(3, rng()), ahead._Worker.send

    def interrupted(worker, errand) -> None:  # type: ignore[no-untyped-def]
        if sent:
            send(worker, errand)
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead._Worker, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafter.draft_ahead(draft, 3, rng())
    drafter.start([*PROMPT, 4], sampling=Sampling())
    assert drafter.propose(3, rng()).token_ids.tolist() == expected([*PROMPT, 4], 3)
    drafter.close()


def test_the_thread_lives_from_the_first_errand_to_the_end() -> None:
    drafter = AheadDrafter(ModelDrafter(toy_draft(3)))
    drafter.start(PROMPT, sampling=Sampling())
    draft = drafter.propose(2, rng())
    assert workers() == 0
    drafter.draft_ahead(draft, 2, rng())
    assert workers() == 1
    drafter.close()
    assert workers() == 0
    drafter.close()
    drafter.start(PROMPT, sampling=Sampling())
    drafter.draft_ahead(drafter.propose(2, rng()), 2, rng())
    assert workers() == 1
    del drafter  # dropped in the middle of its work; the fixture sees the thread end


@pytest.mark.parametrize("verb", ["close", "start", "propose"])
def test_work_under_way_is_dropped(verb: str) -> None:
    engine = Gated(toy_draft(3))
    drafter, _, draft = begun(engine, later=9)
    engine.wait_for_pass()
    engine.let_through(99)
    match verb:
        case "close":
            drafter.close()
        case "start":
            drafter.start([*PROMPT, 4], sampling=Sampling())
            assert drafter.propose(2, rng()).token_ids.tolist() == expected([*PROMPT, 4], 2)
        case _:  # asked again before anything was verified
            assert drafter.propose(3, rng()).token_ids.tolist() == draft.token_ids.tolist()
    drafter.close()


def test_a_full_context_leaves_nothing_to_do() -> None:
    drafter = AheadDrafter(ModelDrafter(toy_draft(3, max_context=len(PROMPT) + 2)))
    drafter.start(PROMPT, sampling=Sampling())
    draft = drafter.propose(3, rng())
    assert len(draft) == 3 and not drafter.draft_ahead(draft, 3, rng())
    assert not drafter.draft_ahead(drafter.propose(2, rng()), 3, rng())
    assert drafter.draft_ahead(drafter.propose(1, rng()), 3, rng())
    drafter.close()


# --- in a round ------------------------------------------------------------------------------------------------------


VERIFIERS = {"greedy": (None, Sampling()), "match": (MatchVerifier(), SAMPLINGS[2]), "rejection": (RejectionVerifier(), SAMPLINGS[1])}


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("draft", [toy_lm, toy_draft], ids=["the target itself", "a weaker model"])
def test_every_round_is_what_it_is_without(name: str, draft: Callable[[int], ToyEngine]) -> None:
    """Tokens, drafts and what was kept of them, with the same seed: so the law is that of the drafter without it, too."""
    verify, sampling = VERIFIERS[name]
    for seed in range(6):
        for k in (1, 3, 6):
            options = {"n": 40, "k": k, "sampling": sampling, "verify": verify, "seed": seed}
            plain = run_rounds(toy_lm(seed), ModelDrafter(draft(seed)), PROMPT, **options)  # type: ignore[arg-type]
            ahead = run_rounds(toy_lm(seed), AheadDrafter(ModelDrafter(draft(seed))), PROMPT, **options)  # type: ignore[arg-type]
            assert [(r.token_ids, r.origins, r.trace.drafted) for r in ahead] == [(r.token_ids, r.origins, r.trace.drafted) for r in plain]
            assert sum(r.trace.ahead for r in ahead) > 0 == sum(r.trace.ahead for r in plain)


def test_a_round_tells_what_was_made_ahead() -> None:
    target, draft = toy_lm(3), toy_lm(3)
    rounds = run_rounds(target, AheadDrafter(ModelDrafter(draft)), PROMPT, n=40, k=4)
    traces = [r.trace for r in rounds]
    assert [t.predrafted for t in traces] == [0, *(t.drafted for t in traces[1:])]
    assert [t.ahead for t in traces] == [1] * (len(traces) - 1) + [0], "nothing follows the last round"
    assert draft.rows == target.rows - 1, "what the target read but its last token, once"
    assert draft.deepest < len(PROMPT) + 40
    assert all(0 <= t.offer_ms <= t.draft_ms for t in traces)


def test_a_drafter_that_cannot_is_not_asked() -> None:
    pool = Pool(NgramDrafter(), ModelDrafter(toy_draft(3)))
    pool.start(PROMPT, sampling=Sampling())
    for name in ("ngram", "model"):
        assert not pool.draft_ahead(pool.propose(name, 2, rng()), 2, rng())
    assert not any(offer.ahead for offer in pool.offers(4))


def test_a_failure_ahead_is_a_fault_like_any_other() -> None:
    engine = Gated(toy_lm(3))
    engine.fails.append(RuntimeError("driver gone"))
    engine.let_through(10_000)
    drafter = AheadDrafter(ModelDrafter(engine))
    rounds = run_rounds(toy_lm(3), drafter, PROMPT, n=60, k=3)
    drafter.close()  # the captured log still holds the error, and with it the drafter
    assert [t for r in rounds for t in r.token_ids] == run_ids(toy_lm(3), ModelDrafter(toy_lm(3)), PROMPT, n=60, k=3)
    assert [f for r in rounds for f in r.trace.faults] == ["model: RuntimeError: driver gone"]
    assert rounds[1].trace.faults and all(r.trace.drafted == 0 for r in rounds[1:FIRST_REST])
    assert any(r.trace.predrafted for r in rounds[FIRST_REST:]), "it came back"


def test_two_answers_at_once_share_a_draft_engine() -> None:
    draft, answers = toy_draft(3), dict[int, list[int]]()

    def answer(seed: int) -> None:
        answers[seed] = run_ids(toy_lm(seed), AheadDrafter(ModelDrafter(draft)), PROMPT, n=60, k=4)

    threads = [threading.Thread(target=answer, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {seed: run_ids(toy_lm(seed), ModelDrafter(toy_draft(3)), PROMPT, n=60, k=4) for seed in range(3)}


def test_a_cancelled_answer_leaves_the_drafter_usable() -> None:
    drafter = AheadDrafter(ModelDrafter(toy_draft(3)))
    for n_rounds in range(1, 4):
        parts = parts_for(toy_lm(3), drafter, PROMPT, k=4)
        parts.drafters.start(PROMPT, sampling=Sampling(), cancel=parts.cancel)
        prefill(parts, PROMPT)
        with pytest.raises(Cancelled):
            for i, _ in enumerate(decode(parts, PROMPT[-1], max_tokens=200, stop_ids=frozenset()), start=1):
                if i == n_rounds:
                    parts.cancel.cancel()
    assert run_ids(toy_lm(3), drafter, PROMPT, n=40, k=4) == run_ids(toy_lm(3), ModelDrafter(toy_draft(3)), PROMPT, n=40, k=4)
