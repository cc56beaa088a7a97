from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import Policy, RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.entropy import EntropyPolicy
from edgespec.scheduling.fixed import FixedPolicy
from edgespec.scheduling.parse import parse_policy
from edgespec.scheduling.window import WindowPolicy
from tests.helpers.rounds import made_round, made_state

GENERIC = DeviceProfile.generic()


def plan(policy: Policy, history: list[RoundTrace], state: RoundState | None = None, knobs: Knobs | None = None) -> Plan:
    return policy(history, state or made_state(), GENERIC, knobs or Knobs())


def test_fixed_plans_its_number_within_room_and_knobs() -> None:
    assert plan(FixedPolicy(4), []).draft_tokens == 4
    assert plan(FixedPolicy(4), [], made_state(room=2)).draft_tokens == 2
    assert plan(FixedPolicy(4), [], knobs=Knobs(max_draft_tokens=3)).draft_tokens == 3
    with pytest.raises(ValueError, match="draft_tokens"):
        FixedPolicy(-1)


def test_window_lengthens_while_nearly_all_is_kept() -> None:
    policy, history = WindowPolicy(window=4, first=4, longest=7), list[RoundTrace]()
    lengths: list[int] = []
    for i in range(5):
        lengths.append(plan(policy, history).draft_tokens)
        history.append(made_round(i, planned=lengths[-1], kept=lengths[-1]))
    assert lengths == [4, 5, 6, 7, 7]


def test_window_shortens_while_most_is_refused() -> None:
    policy, history = WindowPolicy(window=4, first=4), list[RoundTrace]()
    lengths: list[int] = []
    for i in range(5):
        lengths.append(plan(policy, history).draft_tokens)
        history.append(made_round(i, planned=lengths[-1], kept=0))
    assert lengths == [4, 3, 2, 1, 1]


def test_window_holds_between_the_thresholds() -> None:
    assert plan(WindowPolicy(), [made_round(0, planned=4, kept=3)] * 10).draft_tokens == 4


def test_window_forgets_what_lies_outside_it() -> None:
    bad = [made_round(i, planned=4, kept=0) for i in range(3)]
    good = [made_round(3 + i, planned=1, kept=1) for i in range(2)]
    assert plan(WindowPolicy(window=2), [*bad, *good]).draft_tokens == 2  # 4 3 2 1 | mixed: 1/3 kept -> 1 | 2/2 kept -> 2


def test_window_ignores_rounds_without_a_draft() -> None:
    idle = [made_round(i, planned=4, drafted=0) for i in range(50)]
    assert plan(WindowPolicy(), [*idle, made_round(50, planned=4, kept=4), *idle]).draft_tokens == 5


def test_window_does_not_lengthen_what_was_never_tried() -> None:
    capped = [made_round(i, planned=2, kept=2) for i in range(20)]
    assert plan(WindowPolicy(first=4), capped).draft_tokens == 4


@pytest.mark.parametrize(("nats", "length"), [(0.0, 8), (0.49, 8), (0.5, 4), (0.99, 4), (1.0, 1), (5.0, 1), (None, 4)])
def test_entropy_rule(nats: float | None, length: int) -> None:
    policy = EntropyPolicy()
    assert policy.wants_entropy
    assert plan(policy, [], made_state(entropy=nats)).draft_tokens == length


@pytest.mark.parametrize("name", ["fixed:0", "fixed:16", "window", "entropy", "adaptive", "adaptive+governor", "fixed:2+governor"])
def test_names_round_trip(name: str) -> None:
    assert parse_policy(name).name == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fixed",
        "fixed:",
        "fixed:-1",
        "fixed:x",
        "fixed:²",
        "windows",
        "window:3",
        "entropy:1",
        "magic",
        "magic+governor",
        "+governor",
        "window+governor+governor+",
    ],
)
def test_unknown_names_are_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(ValueError, match=r"fixed:N.*window.*entropy"):
        parse_policy(text)


rounds = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=40).map(
    lambda rows: [made_round(i, planned=p, drafted=min(d, p), kept=min(k, d, p)) for i, (p, d, k) in enumerate(rows)]
)


@given(rounds, st.integers(0, 20), st.integers(0, 20), st.sampled_from(["fixed:7", "window", "entropy"]))
def test_never_beyond_room_or_knobs(history: list[RoundTrace], room: int, most: int, name: str) -> None:
    found = plan(parse_policy(name), history, made_state(room=room, entropy=0.1), Knobs(max_draft_tokens=most))
    assert 0 <= found.draft_tokens <= min(room, most)
    assert found.reason


@given(rounds)
def test_window_is_a_function_of_the_history_alone(history: list[RoundTrace]) -> None:
    grown = WindowPolicy()
    step_by_step = [plan(grown, history[:n]) for n in range(len(history) + 1)]
    assert step_by_step == [plan(WindowPolicy(), history[:n]) for n in range(len(history) + 1)]
    assert plan(grown, history[: len(history) // 2]) == step_by_step[len(history) // 2]  # an older history, asked again


def test_nothing_is_drafted_below_the_users_battery_limit() -> None:
    knobs = Knobs(min_battery=0.3)
    cases = [
        (PowerThermalState(source="battery", battery=0.2), 0),
        (PowerThermalState(source="battery", battery=0.4), 4),
        (PowerThermalState(source="ac", battery=0.2), 4),
        (PowerThermalState(), 4),
    ]
    for power, expected in cases:
        state = RoundState(context_len=1, room=9, power=power)
        assert plan(FixedPolicy(4), [], state, knobs).draft_tokens == expected
