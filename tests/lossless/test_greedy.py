"""Promise 1: greedy output with any drafter equals plain decoding. Promise 3: a drafter equal to its target is never refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.drafter import Drafter
from edgespec.core.sampling import Sampling
from edgespec.drafting.ahead import AheadDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.verification.match import MatchVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.toyloop import run_ids, run_rounds
from tests.helpers.toys import AdversaryDrafter, TreeDrafter, fixed_dist, toy_draft, toy_lm


def drafters(seed: int):
    return [
        NgramDrafter(min_n=1, max_n=3),
        AdversaryDrafter(15),
        ModelDrafter(toy_draft(seed)),
        ModelDrafter(toy_lm(seed)),
        TreeDrafter(toy_draft(seed), width=3),
        AheadDrafter(ModelDrafter(toy_draft(seed))),
        AheadDrafter(ModelDrafter(toy_lm(seed))),
    ]


PENALTIES = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=0.7),
    Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, bias={3: 2.0, 5: -4.0}),
]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 8),
    which=st.integers(0, 6),
    options=st.sampled_from(PENALTIES),
    prompt=st.lists(st.integers(0, 14), min_size=1, max_size=8),
)
def test_greedy_equals_plain_decoding(seed: int, k: int, which: int, options: Sampling, prompt: list[int]) -> None:
    plain = run_ids(toy_lm(seed), NoDrafter(), prompt, n=24, k=0, sampling=options)
    # A sampling drafter's guesses are judged by the target's argmax all the same.
    assert run_ids(toy_lm(seed), drafters(seed)[which], prompt, n=24, k=k, sampling=options, seed=seed) == plain


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("options", PENALTIES[1:4], ids=["repetition", "presence", "frequency"])
def test_esb_07_penalties_see_each_token_once_at_every_draft_depth(options: Sampling, k: int) -> None:
    for seed in range(100):
        prompt = [seed % 15, seed % 7, 3]
        plain = run_ids(toy_lm(seed), NoDrafter(), prompt, n=20, k=0, sampling=options)
        assert run_ids(toy_lm(seed), ModelDrafter(toy_draft(seed)), prompt, n=20, k=k, sampling=options) == plain


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.3, top_k=4, top_p=0.9, min_p=0.02, repetition_penalty=1.2)]
)
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("wrap", [lambda drafter: drafter, AheadDrafter], ids=["model", "ahead"])
def test_a_drafter_that_is_the_target_is_never_refused(sampling: Sampling, k: int, wrap: Callable[[ModelDrafter], Drafter]) -> None:
    rounds = run_rounds(
        toy_lm(3), wrap(ModelDrafter(toy_lm(3))), [1, 2, 3], n=40 * (k + 1), k=k, sampling=sampling, verify=RejectionVerifier()
    )
    assert len(rounds) == 40
    for round in rounds:
        assert round.trace.kept == round.trace.drafted == k
        assert round.origins[-1] == "bonus"


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_same_seed_gives_the_same_text_with_any_drafter_when_matching(k: int) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95)
    plain = run_ids(toy_lm(5), NoDrafter(), [1, 2], n=50, k=0, sampling=sampling, verify=MatchVerifier())
    for drafter in drafters(5):
        assert run_ids(toy_lm(5), drafter, [1, 2], n=50, k=k, sampling=sampling, verify=MatchVerifier()) == plain


@pytest.mark.parametrize("k", [0, 4])
def test_equal_logits_give_the_lowest_id(k: int) -> None:
    import numpy as np

    tied = np.array([0.0, 3.0, 3.0, 3.0], np.float32)
    assert run_ids(fixed_dist(tied), AdversaryDrafter(4), [0], n=10, k=k) == [1] * 10
