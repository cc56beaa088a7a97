from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from edgespec.core.device import DeviceProfile, PowerThermalState, Thermal, UnitProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.fixed import FixedPolicy
from edgespec.scheduling.governor import HOLD_S, Governor
from edgespec.scheduling.thermal import Stage, ThermalModel
from edgespec.scheduling.window import WindowPolicy
from tests.helpers.rounds import made_round

GENERIC = DeviceProfile.generic()


def ask(
    governor: Governor, power: PowerThermalState | None = None, history: list[RoundTrace] | None = None, knobs: Knobs | None = None
) -> Plan:
    return governor(history or [], RoundState(context_len=1, room=100, power=power), GENERIC, knobs or Knobs())


def rounds(word: Thermal, seconds: float, start: int = 0) -> list[RoundTrace]:
    return [made_round(start + i, verify_ms=1000.0, thermal=word) for i in range(int(seconds))]


def test_a_cool_device_gets_the_policys_own_plan() -> None:
    plain = FixedPolicy(12)
    state = RoundState(context_len=1, room=100, power=PowerThermalState())
    assert Governor(plain)([], state, GENERIC, Knobs()) == plain([], state, GENERIC, Knobs())


@pytest.mark.parametrize(("word", "most"), [("nominal", 12), ("fair", 8), ("serious", 6), ("critical", 4)])
def test_heat_shortens_drafts_and_rests_the_device(word: Thermal, most: int) -> None:
    plan = ask(Governor(FixedPolicy(12)), PowerThermalState(thermal=word), rounds("nominal", 5))
    assert plan.draft_tokens == most
    assert (plan.pause_ms > 0) == (word == "critical")
    assert ("thermal state" in plan.reason) == (word != "nominal")


def test_it_never_raises_a_plan() -> None:
    assert ask(Governor(FixedPolicy(1)), PowerThermalState(thermal="fair")).draft_tokens == 1
    assert ask(Governor(FixedPolicy(0)), PowerThermalState(thermal="critical")).draft_tokens == 0


def test_a_level_is_held_for_a_while_and_then_given_back() -> None:
    governor = Governor(FixedPolicy(12))
    hot = rounds("serious", 3)
    lengths = [
        ask(governor, PowerThermalState(), [*hot, *rounds("nominal", seconds, start=3)]).draft_tokens for seconds in range(int(HOLD_S) + 5)
    ]
    assert lengths[0] == 6 and lengths[-1] == 12
    assert sum(a != b for a, b in itertools.pairwise(lengths)) == 1
    assert lengths.index(12) == pytest.approx(HOLD_S, abs=1.5)


def test_a_device_at_the_edge_does_not_flap() -> None:
    governor, history = Governor(FixedPolicy(12)), list[RoundTrace]()
    lengths: list[int] = []
    for i in range(120):
        word: Thermal = "serious" if i % 7 == 0 else "fair"
        lengths.append(ask(governor, PowerThermalState(thermal=word), history).draft_tokens)
        history.append(made_round(i, verify_ms=1000.0, thermal=word))
    assert set(lengths) == {6}


BATTERY = PowerThermalState(source="battery", battery=0.15)


@pytest.mark.parametrize(
    ("power", "knobs", "most"),
    [
        (PowerThermalState(low_power_mode=True), Knobs(), 8),
        (BATTERY, Knobs(), 8),
        (replace(BATTERY, battery=0.05), Knobs(), 6),
        (replace(BATTERY, battery=0.05), Knobs(energy="fast"), 12),
        (replace(BATTERY, battery=0.9), Knobs(energy="saver"), 8),
        (replace(BATTERY, source="ac"), Knobs(), 12),
        (replace(BATTERY, battery=0.9), Knobs(), 12),
    ],
)
def test_battery(power: PowerThermalState, knobs: Knobs, most: int) -> None:
    assert ask(Governor(FixedPolicy(12)), power, knobs=knobs).draft_tokens == most


def test_an_old_reading_of_heat_still_counts_and_is_labelled() -> None:
    plan = ask(Governor(FixedPolicy(12)), PowerThermalState(thermal="serious", stale=True))
    assert plan.draft_tokens == 6 and "old reading" in plan.reason


def test_the_forecast_acts_before_the_limit() -> None:
    model = ThermalModel(25.0, (Stage(10.0, 100.0),))  # 8 W end at 105 degrees
    governor = Governor(FixedPolicy(12), model=model, serious_c=80.0)
    history: list[RoundTrace] = []
    state = model.cold()
    for i in range(200):
        if ask(governor, PowerThermalState(), history).draft_tokens < 12:
            break
        state = state.after(8.0, 1.0)
        history.append(replace(made_round(i, verify_ms=1000.0, thermal="nominal"), energy_mj=8000.0, temperature_c=state.celsius))
    assert 60.0 < state.celsius < 80.0
    gentle = [replace(trace, energy_mj=2000.0, temperature_c=None) for trace in history]
    assert ask(governor, PowerThermalState(), gentle).draft_tokens == 12  # 2 W never get there


@pytest.mark.parametrize(
    ("npu_gbs", "npu_w", "unit"),
    [(60.0, 2.0, "npu"), (60.0, 9.0, ""), (10.0, 2.0, ""), (None, 2.0, "")],  # slower but frugal; no gain; far too slow; unknown
)
def test_heat_moves_work_to_the_cooler_unit_where_that_pays(npu_gbs: float | None, npu_w: float, unit: str) -> None:
    units = {"gpu": UnitProfile(bandwidth_gbs=80.0, busy_w=8.0), "npu": UnitProfile(bandwidth_gbs=npu_gbs, busy_w=npu_w)}
    profile = DeviceProfile(chip="x", units=units)
    for word, expected in (("nominal", ""), ("serious", unit)):
        power = PowerThermalState(thermal="serious" if word == "serious" else "nominal")
        state = RoundState(context_len=1, room=9, power=power, units=("gpu", "npu"))
        assert Governor(FixedPolicy(2))([], state, profile, Knobs()).unit == expected


@pytest.mark.parametrize("among", [(), ("gpu",), ("npu",), ("gpu", "cpu")])
def test_work_is_moved_only_among_the_units_that_the_session_has(among: tuple[str, ...]) -> None:
    units = {"gpu": UnitProfile(bandwidth_gbs=80.0, busy_w=8.0), "npu": UnitProfile(bandwidth_gbs=60.0, busy_w=2.0)}
    state = RoundState(context_len=1, room=9, power=PowerThermalState(thermal="serious"), units=among)
    plan = Governor(FixedPolicy(2))([], state, DeviceProfile(chip="x", units=units), Knobs())
    assert plan.unit == "" and "npu" not in plan.reason


def test_it_is_a_function_of_the_history() -> None:
    history = [*rounds("serious", 4), *rounds("nominal", 30, start=4)]
    grown = Governor(WindowPolicy())
    for n in range(len(history)):
        assert ask(grown, None, history[:n]) == ask(Governor(WindowPolicy()), None, history[:n])


def test_the_policy_chooses_within_what_a_level_leaves() -> None:
    """It must not go on wishing for lengths that are cut afterwards."""
    asked: list[Knobs] = []

    class Listening(FixedPolicy):
        def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
            asked.append(knobs)
            return super().__call__(history, state, profile, knobs)

    ask(Governor(Listening(12)), PowerThermalState(thermal="serious"))
    ask(Governor(Listening(12)), PowerThermalState(thermal="serious"), knobs=Knobs(max_draft_tokens=3))
    ask(Governor(Listening(12)), PowerThermalState())
    assert [knobs.max_draft_tokens for knobs in asked] == [6, 3, Knobs().max_draft_tokens]


def test_a_process_that_was_stopped_does_not_rest_for_it() -> None:
    def pause_ms(history: list[RoundTrace]) -> float:
        return ask(Governor(FixedPolicy(4)), PowerThermalState(thermal="critical"), history).pause_ms

    usual = [made_round(i, verify_ms=20.0, thermal="critical") for i in range(20)]
    stopped = [*usual, made_round(20, verify_ms=600_000.0, thermal="critical")]
    assert pause_ms(usual) == pytest.approx(5.0)  # of 20 ms, so that four fifths are work
    assert pause_ms(stopped) < 1.5 * pause_ms(usual)
    slower = [*usual, *(made_round(i, verify_ms=200.0, thermal="critical") for i in range(20, 80))]
    assert pause_ms(slower) == pytest.approx(50.0, rel=0.05), "longer rounds that last are rested for"
