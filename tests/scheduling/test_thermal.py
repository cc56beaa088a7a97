from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.scheduling.thermal import Stage, ThermalModel

PHONE = ThermalModel(25.0, (Stage(2.0, 5.0), Stage(5.0, 300.0)))


def test_one_stage_follows_the_exponential() -> None:
    model = ThermalModel(20.0, (Stage(4.0, 10.0),))
    assert model.cold().celsius == 20.0
    assert model.cold().after(5.0, 10.0).celsius == pytest.approx(20 + 20 * (1 - math.exp(-1)))
    assert model.cold().after(5.0, 1e6).celsius == pytest.approx(model.steady_c(5.0)) == pytest.approx(40.0)
    assert model.watts_at(40.0) == pytest.approx(5.0)
    assert model.watts_at(10.0) == 0.0


@given(st.floats(0, 10), st.floats(0, 500), st.floats(0, 500))
def test_long_steps_equal_many_short_ones(watts: float, first: float, second: float) -> None:
    whole = PHONE.cold().after(watts, first + second).celsius
    assert PHONE.cold().after(watts, first).after(watts, second).celsius == pytest.approx(whole, abs=1e-9)


def test_it_equals_the_differential_equation() -> None:
    rises, dt = [0.0, 0.0], 0.001
    for step in range(60_000):
        watts = 6.0 if step < 30_000 else 1.0
        rises = [r + dt / s.tau_s * (watts * s.c_per_w - r) for r, s in zip(rises, PHONE.stages, strict=True)]
    assert PHONE.cold().after(6.0, 30.0).after(1.0, 30.0).celsius == pytest.approx(25.0 + sum(rises), abs=0.01)


def test_a_measured_temperature_corrects_the_slow_stage() -> None:
    state = PHONE.cold().after(5.0, 20.0).at(50.0)
    assert state.celsius == pytest.approx(50.0)
    assert state.rise_c[0] == PHONE.cold().after(5.0, 20.0).rise_c[0]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Stage(0.0, 1.0)
    with pytest.raises(ValueError, match="backwards"):
        PHONE.cold().after(1.0, -1.0)
