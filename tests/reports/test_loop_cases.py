"""Field reports that the loop alone can answer."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.core.sampling import Sampling
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.orchestrator.loop import decode, prefill
from edgespec.verification.match import MatchVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.hostile import WrongEverySecondRound
from tests.helpers.toyloop import parts_for, run_ids, run_rounds
from tests.helpers.toys import FIXED_DRAFT, FIXED_TARGET, ToyEngine, fixed_dist, toy_draft, toy_lm


def scripted(answer: list[int], prompt_len: int, vocab_size: int = 12) -> ToyEngine:
    """An engine whose greedy answer is `answer`, then id 1 for ever."""

    def law(tokens: list[int]) -> np.ndarray:
        i = len(tokens) - prompt_len
        logits = np.zeros(vocab_size, np.float32)
        logits[answer[i] if 0 <= i < len(answer) else 1] = 5.0
        return logits

    return ToyEngine(law, vocab_size=vocab_size)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_esb_02_a_stop_id_inside_a_draft_ends_the_answer_there(k: int) -> None:
    plain = run_ids(toy_lm(4), NoDrafter(), [1, 2, 3], n=13, k=0)
    for stop in plain:
        for drafter in (ModelDrafter(toy_lm(4)), ModelDrafter(toy_draft(4)), NgramDrafter(min_n=1)):
            expected = run_rounds(toy_lm(4), NoDrafter(), [1, 2, 3], n=40, k=0, stop_ids=[stop])
            rounds = run_rounds(toy_lm(4), drafter, [1, 2, 3], n=40, k=k, stop_ids=[stop])
            ids = [t for r in rounds for t in r.token_ids]
            assert ids == [t for r in expected for t in r.token_ids] == plain[: plain.index(stop) + 1]
            assert rounds[-1].finish == expected[-1].finish == "stop"


@pytest.mark.parametrize(
    ("cap", "ids", "finish"), [(2, [5, 6], "length"), (3, [5, 6, 2], "stop"), (4, [5, 6, 2], "stop"), (9, [5, 6, 2], "stop")]
)
def test_esb_06_a_stop_inside_the_budget_is_a_stop(cap: int, ids: list[int], finish: str) -> None:
    answer = [5, 6, 2, 8, 9, 10]
    rounds = run_rounds(scripted(answer, 3), ModelDrafter(scripted(answer, 3)), [3, 3, 3], n=cap, k=6, stop_ids=[2])
    assert [t for r in rounds for t in r.token_ids] == ids
    assert rounds[-1].finish == finish


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_esb_13_exactly_max_tokens_and_no_draft_work_beyond_them(n: int) -> None:
    target, draft = toy_lm(2), toy_lm(2)
    rounds = run_rounds(target, ModelDrafter(draft), [1, 2, 3], n=n, k=8)
    assert sum(r.trace.emitted for r in rounds) == n
    assert sum(r.trace.drafted for r in rounds) <= n - 1
    assert rounds[-1].finish == "length"
    assert draft.deepest <= 3 + n - 1 and target.deepest <= 3 + n - 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_esb_18_padded_vocabularies_of_different_width(sampling: Sampling) -> None:
    target = toy_lm(6, rows=24)
    ids = run_ids(target, ModelDrafter(toy_lm(6)), [1, 2, 3], n=60, k=4, sampling=sampling, verify=RejectionVerifier())
    assert max(ids) < 16
    if sampling.greedy:
        assert ids == run_ids(toy_lm(6, rows=24), NoDrafter(), [1, 2, 3], n=60, k=0)


def test_esb_18_a_narrower_draft_law_is_extended_with_zeros() -> None:
    """Draft logits 3 wide, target 4: the fourth token can only come from the residual, at its full probability."""
    counts = np.zeros(4)
    drafter = ModelDrafter(fixed_dist(FIXED_DRAFT[:3]))
    target = fixed_dist(FIXED_TARGET)
    for trial in range(8000):
        counts[
            run_ids(target, drafter, [0], n=2, k=1, sampling=Sampling(temperature=1.0), verify=RejectionVerifier(), seed=trial, capacity=8)[
                0
            ]
        ] += 1
    assert np.abs(counts / 8000 - [0.5793, 0.2131, 0.1293, 0.0784]).max() < 0.02


@pytest.mark.parametrize("k", [0, 1, 4])
def test_esb_46_logprobs_are_the_targets_for_every_origin(k: int) -> None:
    seen = set[str]()
    for draft in (FIXED_TARGET, FIXED_DRAFT):
        rounds = run_rounds(fixed_dist(FIXED_TARGET), ModelDrafter(fixed_dist(draft)), [0], n=20, k=k, sampling=Sampling(logprobs=2))
        for round in rounds:
            assert len(round.logprobs) == len(round.token_ids)
            for entry, token in zip(round.logprobs, round.token_ids, strict=True):
                assert entry.token_id == token == 0
                assert entry.logprob == pytest.approx(-0.5460, abs=1e-4)
                assert [i for i, _ in entry.top] == [0, 1]
            seen |= set(round.origins)
    assert seen == ({"plain"} if k == 0 else {"drafted", "bonus", "corrected", "plain"})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)])
def test_esb_48_a_draft_with_a_shorter_context_stops_guessing(sampling: Sampling) -> None:
    target, draft = toy_lm(8, max_context=256), toy_draft(8, max_context=64)
    prompt = [1, 2, 3, 4]
    rounds = run_rounds(target, ModelDrafter(draft), prompt, n=196, k=4, sampling=sampling, verify=MatchVerifier(), capacity=256)
    plain = run_ids(toy_lm(8, max_context=256), NoDrafter(), prompt, n=196, k=0, sampling=sampling, verify=MatchVerifier(), capacity=256)
    assert [t for r in rounds for t in r.token_ids] == plain
    assert draft.deepest <= 64
    assert draft.rows <= 5 * len(rounds) + len(prompt)
    assert rounds[-1].trace.drafted == 0 < rounds[0].trace.drafted


def test_esb_68_counts_stop_at_the_stop() -> None:
    answer = [5, 6, 2, 8, 9]
    rounds = run_rounds(scripted(answer, 1), ModelDrafter(scripted(answer, 1)), [3], n=20, k=5, stop_ids=[2])
    (round,) = rounds
    assert round.token_ids == (5, 6, 2)
    assert (round.trace.kept, round.trace.emitted, round.trace.drafted) == (2, 3, 5)
    assert round.origins == ("drafted", "drafted", "drafted")


def test_esb_73_the_last_position_is_never_fed() -> None:
    target, draft = toy_lm(1, max_context=64), toy_lm(1, max_context=64)
    prompt = [t % 15 for t in range(60)]
    rounds = run_rounds(target, ModelDrafter(draft), prompt, n=4, k=8)
    assert sum(r.trace.emitted for r in rounds) == 4
    assert target.deepest < 64 and draft.deepest < 64


def test_blocks_and_refusals_alternate_without_leaving_a_trace() -> None:
    plain = run_ids(toy_lm(9), NoDrafter(), [1, 2, 3, 4, 5, 6], n=40, k=0)
    assert run_ids(toy_lm(9), WrongEverySecondRound(ModelDrafter(toy_lm(9)), 15), [1, 2, 3, 4, 5, 6], n=40, k=4) == plain


def test_a_draft_that_turns_to_nan_is_dropped_and_the_answer_stays() -> None:
    calls = 0

    def law(tokens: list[int]) -> np.ndarray:
        nonlocal calls
        calls += 1
        good = toy_draft(3).law(tokens)
        return good if calls < 10 else np.full_like(good, np.nan)

    for sampling in (Sampling(), Sampling(temperature=0.9)):
        calls = 0
        ids = run_ids(toy_lm(3), ModelDrafter(ToyEngine(law, vocab_size=16)), [1, 2], n=30, k=3, sampling=sampling, verify=MatchVerifier())
        assert ids == run_ids(toy_lm(3), NoDrafter(), [1, 2], n=30, k=0, sampling=sampling, verify=MatchVerifier())
        assert calls > 10


def test_work_is_counted_one_forward_per_round_and_only_new_prompt_tokens() -> None:
    target = toy_lm(5)
    prompt = [t % 15 for t in range(600)]
    parts = parts_for(target, NgramDrafter(), prompt, k=4)
    steps: list[tuple[int, int]] = []
    prefill(parts, prompt, lambda done, total: steps.append((done, total)))
    assert (target.forwards, target.rows) == (3, 599)
    assert steps == [(257, 600), (513, 600), (600, 600)]
    rounds = list(decode(parts, prompt[-1], max_tokens=30, stop_ids=frozenset()))
    assert target.forwards == 3 + len(rounds)
    assert target.rows == 599 + sum(r.trace.rows for r in rounds)
