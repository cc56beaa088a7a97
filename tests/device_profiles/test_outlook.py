from __future__ import annotations

import pytest

from edgespec_device_profiles.measured import Answer, DraftCost, Kind
from edgespec_device_profiles.outlook import Step, alphas, best, outlook
from edgespec_device_profiles.verdict import drift, gain, one_for_all, verdicts
from tests.helpers.timed import example


def kind(**changes: object) -> Kind:
    figures: dict[str, object] = {"rounds": 100, "offered": (50, 50), "tested": (50, 40), "kept": (40, 20), "context": 64.0}
    return Kind(**figures | changes)  # type: ignore[arg-type]


def test_plain_decoding_is_the_unit() -> None:
    assert outlook(example(), kind())[0] == Step(0, 1.0, 10.0, 1.0)


def test_offers_acceptance_and_costs_by_hand() -> None:
    """Half of the rounds offer two tokens; α = .8 and (20 + 2·.8)/42; 10, 11 and 12 ms for 1, 2 and 3 rows; 1 ms a guess, .2 a miss."""
    measured = example(draft=DraftCost(name="small", ms_per_token=1.0, miss_ms=0.2), other_ms=0.5)
    _, one, two = outlook(measured, kind())
    assert alphas(kind()) == pytest.approx([0.8, 21.6 / 42])
    assert one.tokens == pytest.approx(1 + 0.5 * 0.8)
    assert one.ms == pytest.approx(0.5 + 0.5 * 10.2 + 0.5 * (11 + 1))
    assert two.tokens == pytest.approx(1 + 0.5 * 0.8 * (1 + 21.6 / 42))
    assert two.ms == pytest.approx(0.5 + 0.5 * 10.2 + 0.5 * (12 + 2))
    assert two.speed_up == pytest.approx(two.tokens * 10.5 / two.ms)  # plain decoding pays no miss


def test_offers_that_are_shorter_than_allowed_cost_only_what_they_are() -> None:
    short = kind(offered=(100, 50), tested=(100, 40), kept=(80, 20))
    assert outlook(example(), short)[2].ms == pytest.approx(0.5 * 11 + 0.5 * 12)


def test_positions_that_were_never_tested_are_not_guessed_at() -> None:
    assert len(outlook(example(), kind(offered=(50, 50, 50), tested=(50, 3, 0), kept=(3, 0, 0)))) == 3
    assert outlook(example(), kind(rounds=0, offered=(), tested=(), kept=())) == []
    assert outlook(example(units={}), kind()) == []


@pytest.mark.parametrize(
    ("speeds", "length"),
    [
        ([1.0, 1.3, 1.5, 1.4], 2),
        ([1.0, 1.30, 1.45, 1.46, 1.47], 2),  # longer is not really better
        ([1.0, 1.02, 1.01], 0),  # no gain worth having
        ([1.0, 1.025, 1.05], 2),  # as good as any, but no gain by itself
        ([1.0, 0.8], 0),
        ([1.0], 0),
    ],
)
def test_the_shortest_draft_that_is_as_good_as_any(speeds: list[float], length: int) -> None:
    found = best([Step(n, 1.0, 1.0, speed) for n, speed in enumerate(speeds)])
    assert found is not None and found.draft_tokens == length


def test_nothing_known_nothing_said() -> None:
    assert best([]) is None
    assert one_for_all(example(kinds={})) is None
    assert verdicts(example(units={})) == []


def test_verdicts_name_the_length_the_gain_and_the_reason() -> None:
    code, chat = verdicts(example())
    assert code.draft_tokens > 2 and not code.thin
    assert code.headline == f"Draft {code.draft_tokens} tokens on code: {code.expected:.2f}x expected"
    assert code.measured == pytest.approx(2.0)
    assert "80% of the first guesses are right" in code.why
    assert (chat.headline, chat.expected) == ("Do not draft on chat", 1.0)
    assert "no gain worth having" in chat.why


def test_few_rounds_are_a_hint_and_outvoted() -> None:
    few = kind(rounds=9, offered=(9, 9), tested=(9, 9), kept=(9, 9))
    chat = example().kinds["chat"]
    good, bad = verdicts(example(kinds={"code": few, "chat": chat}))
    assert good.thin and good.headline.startswith("Perhaps draft 2 tokens on code")
    assert not bad.thin and bad.draft_tokens == 0
    overall = one_for_all(example(kinds={"code": few, "chat": chat}))
    assert overall is not None and overall.draft_tokens == 0
    alone = one_for_all(example(kinds={"code": few}))
    assert alone is not None and alone.draft_tokens == 2


def test_a_drafter_with_nothing_to_say() -> None:
    [found] = verdicts(example(kinds={"chat": kind(offered=(0, 0), tested=(0, 0), kept=(0, 0))}))
    assert found.draft_tokens == 0 and "never anything to guess" in found.why


def test_one_length_for_all_weighs_the_kinds() -> None:
    overall, (code, _) = one_for_all(example()), verdicts(example())
    assert overall is not None and 1.0 < overall.speed_up < code.expected


def answers(*speeds: float) -> tuple[Answer, ...]:
    return tuple(
        Answer(at_s=float(i), kind=k, mode="plain", tok_s=s * factor)
        for i, s in enumerate(speeds)
        for k, factor in (("code", 1), ("chat", 3))
    )


def test_drift_compares_thirds_kind_by_kind() -> None:
    """ESB-70: speed lost while the system reports nothing shows all the same."""
    found = drift(example(sustained=answers(100, 100, 100, 100, 50, 50)), "plain")
    assert found is not None and found.change == pytest.approx(-0.5)
    assert drift(example(sustained=answers(100, 100)), "plain") is None


def test_the_gain_is_by_time_not_by_answer() -> None:
    pairs = [("plain", 100.0), ("speculative", 50.0), ("plain", 100.0), ("speculative", 200.0)]
    mixed = tuple(Answer(at_s=0.0, kind="code", mode=mode, tok_s=tok_s) for mode, tok_s in pairs)
    assert gain(example(sustained=mixed), "code") == pytest.approx(0.8)
    assert gain(example(sustained=()), "code") is None
