from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.draft import Draft
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome, Verdict
from edgespec.drafting.ngram import NgramDrafter

RNG = np.random.default_rng(0)


def guess(known: list[int], max_tokens: int, **options: int) -> list[int]:
    drafter = NgramDrafter(**options)
    drafter.start(known, sampling=Sampling())
    return drafter.propose(max_tokens, RNG).token_ids.tolist()


def test_nothing_is_guessed_where_nothing_was_seen() -> None:
    assert guess([1, 2, 3], 4) == []
    assert guess([7], 4) == []


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    #       ---------                     the match of three      -- the later match of one
    known = [1, 2, 3, 40, 41, 42, 43, 9, 3, 50, 51, 8, 1, 2, 3]
    assert guess(known, 4) == [40, 41, 42, 43]
    assert guess(known, 4, max_n=1) == [50]


def test_of_equal_matches_the_latest_wins() -> None:
    assert guess([1, 2, 30, 9, 1, 2, 31, 9, 8, 1, 2], 1, min_n=2) == [31]


def test_a_guess_reaches_one_and_a_half_times_as_far_as_the_past_agrees() -> None:
    tail = [60, 61, 62, 63, 64, 65, 66, 67, 68, 69]
    for agreed, expected in ((1, 1), (2, 3), (3, 4), (4, 6), (6, 9)):
        same = list(range(1, agreed + 1))
        assert guess([*same, *tail, 99, *same], 9) == tail[:expected]
    assert guess([*range(1, 7), *tail, 99, *range(1, 7)], 5) == tail[:5]


def test_agreement_is_counted_beyond_the_longest_indexed_ngram() -> None:
    same, tail = list(range(1, 11)), list(range(60, 75))
    assert guess([*same, *tail, 99, *same], 15, max_n=4) == tail


def test_periodic_text_is_continued_inside_the_guess() -> None:
    assert guess([1, 2, 3] * 4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 6), st.data())
def test_what_was_observed_is_as_if_it_had_stood_in_the_prompt(known: list[int], more: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(known)))
    drafter = NgramDrafter()
    drafter.start(known[:cut], sampling=Sampling())
    for token in known[cut:]:
        drafter.observe(Outcome(draft=Draft.empty(context_len=0), verdict=Verdict((), token, "plain")))
    assert drafter.propose(more, RNG).token_ids.tolist() == guess(known, more)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 4), st.integers(0, 5), st.data())
def test_what_became_of_an_offer_is_known_without_asking_for_it(known: list[int], most: int, drafted: int, data: st.DataObject) -> None:
    """Whoever drafted, and however much: the tokens that came out are compared with what it would have guessed."""
    cut = data.draw(st.integers(1, len(known) - 1))
    drafter = NgramDrafter()
    drafter.start(known[:cut], sampling=Sampling())
    offer, would = drafter.offer(most), drafter.propose(most, RNG).token_ids.tolist()
    tokens = known[cut : cut + 1 + drafted]
    draft = Draft.chain(tokens[:-1], context_len=cut, source="another")
    trial = drafter.observe(Outcome(draft=draft, verdict=Verdict(tuple(range(len(draft))), tokens[-1], "bonus")))
    if not would:
        assert trial is None
        return
    assert trial is not None and (trial.drafter, trial.confidence) == ("ngram", offer.confidence)
    assert trial.tested == min(len(would), len(tokens))
    assert trial.right == next((i for i in range(trial.tested) if would[i] != tokens[i]), trial.tested)


def test_a_new_prompt_forgets_the_old_one_and_a_longer_one_goes_on() -> None:
    drafter = NgramDrafter()
    drafter.start([1, 2, 3, 1], sampling=Sampling())
    drafter.start([1, 2, 3, 1, 2], sampling=Sampling())
    assert drafter.propose(2, RNG).token_ids.tolist() == [3, 1]
    drafter.start([5, 1, 2], sampling=Sampling())
    assert drafter.propose(2, RNG).token_ids.tolist() == []


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_senseless_sizes_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="n-gram sizes need"):
        NgramDrafter(min_n=min_n, max_n=max_n)
