from __future__ import annotations

from edgespec.drafting.model import Streak


def test_right_guesses_in_a_row_raise_the_level_and_one_refusal_ends_them() -> None:
    streak = Streak()
    levels = [streak.level]
    for _ in range(7):
        streak.guessed(3, 3)
        levels.append(streak.level)
    assert levels == [1, 1, 2, 3, 3, 3, 3, 4]
    streak.guessed(3, 2)
    assert streak.level == 1
    assert len(Streak.EXPECTED) == len(Streak.FROM) + 1 and sorted(Streak.EXPECTED) == list(Streak.EXPECTED)


def test_tokens_of_others_are_no_refusal_but_many_of_them_say_nothing_of_the_drafter() -> None:
    streak = Streak()
    streak.guessed(8, 8)
    streak.passed(Streak.FORGOTTEN - 1)
    assert streak.level == 3
    streak.guessed(1, 1)
    for _ in range(Streak.FORGOTTEN):
        assert streak.level == 3
        streak.passed(1)
    assert streak.level == 1
