from __future__ import annotations

import pytest

from edgespec.scheduling.meters import GuardedMeter
from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors import Sensors
from edgespec.scheduling.sensors_simulated import SimulatedMeter, SimulatedSource


def test_a_script_is_played_by_the_clock() -> None:
    now = [50.0]
    script = [(1.0, Reading(thermal="fair")), (3.0, OSError("unplugged")), (4.0, Reading(thermal="serious", battery=0.2))]
    source = SimulatedSource(script, clock=lambda: now[0])
    assert source.read() == Reading()
    for at, word in [(51.0, "fair"), (52.9, "fair"), (54.0, "serious"), (99.0, "serious")]:
        now[0] = at
        assert source.read().thermal == word
    now[0] = 53.5
    with pytest.raises(OSError, match="unplugged"):
        source.read()


def test_sensors_play_it_too() -> None:
    now = [0.0]
    hot = SimulatedSource([(0.0, Reading(thermal="nominal")), (10.0, Reading(thermal="critical"))], clock=lambda: now[0])
    sensors = Sensors([hot], clock=lambda: now[0])
    words: list[str] = []
    for now[0] in (0.0, 9.0, 10.0):
        sensors.poll()
        state = sensors.state()
        assert state is not None
        words.append(state.thermal)
    assert words == ["nominal", "nominal", "critical"]


def test_watts_add_up_to_energy() -> None:
    now = [7.0]
    meter = SimulatedMeter([(1.0, 10.0), (3.0, 4.0)], clock=lambda: now[0])
    totals: list[float] = []
    for now[0] in (7.0, 8.0, 8.5, 10.0, 11.0):
        totals.append(meter.total_mj())
    assert totals == pytest.approx([0, 0, 5_000, 20_000, 24_000])
    assert SimulatedMeter([], clock=lambda: now[0]).total_mj() == 0
    assert GuardedMeter(meter).total_mj() == 0  # a guarded one counts from where it began
