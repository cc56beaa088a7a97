from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.scheduling.acceptance import Acceptance
from edgespec.scheduling.costs import DraftCosts, RowCosts

LINE = [1.0 + 0.15 * m for m in range(9)]


def test_unmeasured_rows_follow_the_shape() -> None:
    book = RowCosts()
    assert book.curve(LINE) == LINE
    book.observe(1, 20.0)
    assert book.curve(LINE) == pytest.approx([20.0 * v for v in LINE])


def test_between_measured_rows_the_correction_is_linear() -> None:
    book = RowCosts()
    book.observe(1, 10.0)
    book.observe(5, 32.0)  # twice the shape's 1.6
    curve = book.curve(LINE)
    assert curve[0] == 10.0 and curve[4] == pytest.approx(32.0)
    assert curve[2] == pytest.approx(15.0 * LINE[2])
    assert curve[8] == pytest.approx(20.0 * LINE[8])


def test_a_width_wider_than_asked_for_still_counts() -> None:
    book = RowCosts()
    book.observe(20, 40.0)
    assert book.curve(LINE[:2]) == pytest.approx([40.0 / 1.15, 40.0])


def test_a_lone_spike_is_ignored_and_a_lasting_rise_believed() -> None:
    book = RowCosts()
    for _ in range(10):
        book.observe(1, 10.0)
    book.observe(1, 100.0)
    book.observe(1, 100.0)
    assert book.ms(1) < 11.0
    book.observe(1, 100.0)
    assert book.ms(1) == 100.0


def test_a_slow_first_run_is_forgotten_and_a_fall_believed_at_once() -> None:
    book = RowCosts()
    book.observe(1, 18.0)
    book.observe(1, 10.0)
    assert book.ms(1) == 10.0
    book.observe(1, 10.0)
    book.observe(1, 5.0)
    book.observe(1, 5.0)
    assert book.ms(1) == 5.0


def test_copies_are_independent_and_nonsense_is_ignored() -> None:
    book = RowCosts()
    book.observe(1, 10.0)
    twin = book.copy()
    twin.observe(1, 2.0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        book.observe(1, bad)
    assert book.ms(1) == 10.0 and book.samples(1) == 1
    assert book.age(1) == 0 and book.age(2) == math.inf and book.ms(2) is None


def test_draft_costs_are_a_line() -> None:
    costs = DraftCosts()
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 9))
        costs.observe(n, 3.0 + 2.0 * n)
    assert costs.ms(4) == pytest.approx(11.0, rel=0.05)
    costs.observe(4, 500.0)
    assert costs.ms(4) == pytest.approx(11.0, rel=0.05)
    for _ in range(5):
        costs.observe(4, 33.0)
    assert costs.ms(4) == pytest.approx(33.0, rel=0.2)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
def test_acceptance_is_learnt_by_depth(alpha: float) -> None:
    seen, rng = Acceptance(), np.random.default_rng(1)
    for _ in range(400):
        kept = 0
        while kept < 4 and rng.random() < alpha * (0.5 if kept == 3 else 1.0):
            kept += 1
        seen.observe(4, kept)
    found = seen.alphas(6)
    assert found[0] == pytest.approx(alpha, abs=0.12)
    if alpha > 0.8:
        assert found[3] == pytest.approx(alpha / 2, abs=0.15)  # the depth where it really breaks
    assert found[5] == found[4]  # nothing is known there: like the last known depth
    raised = seen.alphas(6, sigmas=2.0)
    assert all(a < b <= 1.0 for a, b in zip(found, raised, strict=True))


def test_guesses_beyond_the_draft_count_where_the_answer_shows_them() -> None:
    """The token after a draft that was kept whole tells whether one more guess would have been right."""
    seen, alone = Acceptance(), Acceptance()
    for i in range(60):
        seen.observe(1, 1 + i % 2, tested=2)
        alone.observe(1, 1)
    assert seen.alphas(1) == alone.alphas(1)
    assert seen.alphas(2)[1] == pytest.approx(0.5, abs=0.1) and alone.alphas(2)[1] > 0.9


def test_a_change_is_noticed_within_a_few_rounds() -> None:
    seen = Acceptance()
    for _ in range(200):
        seen.observe(4, 4)
    assert any(seen.observe(4, 0) for _ in range(3))
    for _ in range(8):
        seen.observe(4, 0)
    assert seen.alphas(1)[0] < 0.35


def test_a_width_out_of_use_follows_the_pace_of_one_in_use() -> None:
    book = RowCosts()
    for _ in range(3):
        book.observe(1, 10.0)
    for _ in range(30):
        book.observe(4, 20.0)
    for _ in range(200):
        book.observe(4, 30.0)  # slowed by half
    assert book.ms(1) == pytest.approx(15.0, rel=0.01)
    book.observe(1, 14.0)
    assert book.ms(1) == 14.0 and book.ms(4) == pytest.approx(30.0, rel=0.01), "a look says nothing of other widths"


def test_widths_in_use_do_not_drag_each_other() -> None:
    book = RowCosts()
    for _ in range(20):
        book.observe(1, 10.0)
        book.observe(4, 20.0)
    for _ in range(20):
        book.observe(1, 10.0)
        book.observe(4, 60.0)
    assert book.ms(1) == pytest.approx(10.0) and book.ms(4) == pytest.approx(60.0, rel=0.01)


def test_what_slows_all_widths_is_told_by_any_of_them() -> None:
    """A context that grows, say: widths in use are told apart no less well for it, and one out of use goes along."""
    book, rng = RowCosts(), np.random.default_rng(0)
    for _ in range(4):
        book.observe(16, 40.0)
    for i in range(400):
        rows, ms = (1, 10.0) if rng.random() < 0.5 else (4, 14.0)
        book.observe(rows, ms * (1.0 + i / 1000) * (1.0 + 0.03 * rng.standard_normal()))
    one, four, sixteen = book.ms(1), book.ms(4), book.ms(16)
    assert one and four and sixteen
    assert one == pytest.approx(14.0, rel=0.04)
    assert four / one == pytest.approx(1.4, rel=0.02) and sixteen / one == pytest.approx(4.0, rel=0.06)


@pytest.mark.parametrize("factor", [0.7, 0.9, 1.2, 1.5])
def test_another_answer_finds_another_pace_for_all_widths(factor: float) -> None:
    """Another context length makes every width dearer or cheaper, those in use at the end of the last answer too."""
    book = RowCosts()
    for _ in range(40):
        for rows in (1, 2, 4):
            book.observe(rows, 10.0 + rows)
    book.begin()
    for _ in range(6):
        book.observe(1, 11.0 * factor)
    assert [book.ms(rows) for rows in (1, 2, 4)] == pytest.approx([ms * factor for ms in (11.0, 12.0, 14.0)], rel=0.03)
    assert book.copy().curve(LINE) == book.curve(LINE)


def test_one_look_at_a_width_that_is_well_known_changes_it_little() -> None:
    book = RowCosts()
    for _ in range(20):
        book.observe(1, 10.0)
        book.observe(4, 14.0)
    for _ in range(30):
        book.observe(1, 10.0)
    book.observe(4, 17.0)
    assert 14.0 < (book.ms(4) or 0.0) < 15.2 and book.ms(1) == pytest.approx(10.0, rel=0.02)
    book.observe(4, 70.0)
    assert (book.ms(4) or 0.0) < 15.2, "a lone spike counts for nothing"


def test_looks_that_find_what_was_known_count_until_something_moves() -> None:
    book = RowCosts()
    book.observe(1, 10.0)

    def look(ms: float) -> None:
        for _ in range(25):
            book.observe(4, 20.0)
        book.observe(1, ms)

    for _ in range(3):
        look(10.2)
    assert book.confirmed(1) == 3 and not book.outdated(1)
    look(16.0)
    assert book.confirmed(1) == 0
    look(book.ms(1) or 0.0)
    assert book.confirmed(1) == 1
    for _ in range(3):
        book.observe(4, 60.0)
    assert book.confirmed(1) == 0 and book.outdated(1) and not book.outdated(4)


def test_steady_acceptance_is_remembered_longer() -> None:
    young, old = Acceptance(), Acceptance()
    for i in range(40):
        young.observe(1, i % 2)
    for i in range(1000):
        old.observe(1, i % 2)
    assert old.weight > 2.5 * young.weight
    for _ in range(60):
        old.observe(1, 1)
    assert old.alphas(1)[0] > 0.75, "a slow change gives the long memory up"


def test_the_first_pass_of_a_width_is_not_believed_to_be_far_from_its_neighbours() -> None:
    book = RowCosts()
    for _ in range(3):
        book.observe(2, 10.0)
        book.observe(4, 14.0)
    book.observe(3, 100.0)
    book.observe(8, 100.0)
    assert book.ms(3) == pytest.approx(1.25 * 12.0) and book.ms(8) == pytest.approx(1.25 * 22.0)
    book.observe(8, 21.0)
    assert book.ms(8) == 21.0
    book.observe(1, 9.0)  # below both: nothing is foreseen
    assert book.ms(1) == 9.0


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.001, 1e4)), max_size=80))
def test_costs_stay_positive_whatever_was_measured(samples: list[tuple[int, float]]) -> None:
    book = RowCosts()
    for rows, ms in samples:
        book.observe(rows, ms)
    assert all(ms > 0 and math.isfinite(ms) for ms in book.curve([1.0 + 0.15 * m for m in range(21)]))
