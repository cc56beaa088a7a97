"""What the loop may rely on, whoever guesses. To add a drafter, add one case to `DRAFTERS`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.drafter import Drafter
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome, Verdict
from edgespec.drafting.ahead import AheadDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from tests.helpers.toys import toy_draft

VOCAB = 16
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "model": lambda: ModelDrafter(toy_draft(3)),
    "model with a short context": lambda: ModelDrafter(toy_draft(3, max_context=24)),
    "ahead": lambda: AheadDrafter(ModelDrafter(toy_draft(3))),
    "ahead with a short context": lambda: AheadDrafter(ModelDrafter(toy_draft(3, max_context=24))),
}
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, top_k=6), Sampling(temperature=1.2, repetition_penalty=1.3, bias={2: 1.0})]


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
@given(
    prompt=st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=12),
    sampling=st.sampled_from(SAMPLINGS),
    rounds=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, VOCAB - 2)), max_size=10),
    seed=st.integers(0, 99),
)
def test_guesses_fit_what_was_asked_whatever_is_kept(make, prompt, sampling, rounds, seed) -> None:  # type: ignore[no-untyped-def]
    drafter, rng = make(), np.random.default_rng(seed)
    for answer in range(2):
        known = [*prompt, *([1] * answer)]
        drafter.start(known, sampling=sampling)
        for allowed, wanted, correction in rounds:
            entropy = drafter.next_entropy()
            assert entropy is None or 0 <= entropy <= np.log(VOCAB) + 1e-6
            offer = drafter.offer(allowed)
            assert offer == drafter.offer(allowed) and offer.drafter == drafter.name
            assert offer.expected is None or 0.0 <= offer.expected <= 1.0
            draft = drafter.propose(allowed, rng)
            assert len(draft) <= allowed
            assert offer.tokens is None or len(draft) == min(allowed, offer.tokens), "an offer that is stated is kept"
            assert draft.context_len == len(known)
            assert all(0 <= t < VOCAB for t in draft.token_ids)
            if draft.q is not None:
                draft.q.check()
                assert all(draft.q.dense(i, VOCAB)[t] > 0 for i, t in enumerate(draft.token_ids))
            path: list[int] = []
            node = -1
            while len(path) < wanted and (children := draft.children(node)):
                node = children[0]
                path.append(node)
            verdict = Verdict(tuple(path), correction, "correction")
            known += verdict.tokens(draft)
            drafter.observe(Outcome(draft=draft, verdict=verdict))
    drafter.close()


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_the_same_randomness_gives_the_same_guesses_and_none_is_used_without_a_law(make) -> None:  # type: ignore[no-untyped-def]
    for sampling in SAMPLINGS:
        drafts = []
        for _ in range(2):
            drafter, rng = make(), np.random.default_rng(5)
            drafter.start([1, 2, 1, 2, 1], sampling=sampling)
            drafts.append(drafter.propose(4, rng))
            if drafts[-1].q is None:
                assert rng.bit_generator.state == np.random.default_rng(5).bit_generator.state
        assert drafts[0].token_ids.tolist() == drafts[1].token_ids.tolist()


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_asking_for_the_offer_does_no_work_and_does_not_change_the_guess(make) -> None:  # type: ignore[no-untyped-def]
    asked, plain = make(), make()
    for drafter in (asked, plain):
        drafter.start([1, 2, 1, 2, 1], sampling=SAMPLINGS[1])
    for most in (0, 1, 9):
        asked.offer(most)
    assert asked.engine_ms == 0
    one, other = asked.propose(4, np.random.default_rng(1)), plain.propose(4, np.random.default_rng(1))
    assert one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_asking_for_the_entropy_does_not_change_the_guess(make) -> None:  # type: ignore[no-untyped-def]
    asked, plain = make(), make()
    for drafter in (asked, plain):
        drafter.start([1, 2, 1, 2, 1], sampling=SAMPLINGS[1])
    asked.next_entropy()
    one, other = asked.propose(4, np.random.default_rng(1)), plain.propose(4, np.random.default_rng(1))
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_model_reads_every_token_once_and_takes_back_only_what_was_refused() -> None:
    engine = toy_draft(3)
    drafter, rng = ModelDrafter(engine), np.random.default_rng(0)
    drafter.start([1, 2, 3, 4], sampling=Sampling())
    draft = drafter.propose(4, rng)
    assert engine.rows == 4 + 3  # the prompt, and every guess but the last
    drafter.observe(Outcome(draft=draft, verdict=Verdict((0, 1), 7, "correction")))
    drafter.propose(2, rng)
    assert engine.rows == 7 + 1 + 1  # the correction, and one guess: the two kept ones were read already
    drafter.start([1, 2, 3, 4, int(draft.token_ids[0]), 9], sampling=Sampling())
    drafter.propose(1, rng)
    assert engine.rows == 9 + 1
