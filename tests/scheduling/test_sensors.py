from __future__ import annotations

import sys
import threading

import pytest

from edgespec.core.device import PowerThermalState
from edgespec.scheduling import sensors as sensors_module
from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors import Sensors, default_sources, merge, try_sources
from edgespec.scheduling.sensors_simulated import SimulatedSource


class FakeSource:
    def __init__(self, name: str, *answers: Reading | Exception) -> None:
        self.name, self._answers = name, list(answers)

    def read(self) -> Reading:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_nothing_is_known_before_the_first_reading_and_old_readings_are_labelled() -> None:
    now = [100.0]
    sensors = Sensors([FakeSource("a", Reading(thermal="fair"), RuntimeError("gone"))], clock=lambda: now[0])
    assert sensors.state() is None
    sensors.poll()
    assert sensors.state() == PowerThermalState(thermal="fair", read_at_s=100.0)
    now[0] = 104.0
    sensors.poll()
    state = sensors.state()
    assert state is not None and state.thermal == "fair" and not state.stale
    now[0] = 106.0
    state = sensors.state()
    assert state is not None and state.stale and state.thermal == "fair" and state.read_at_s == 100.0


def test_a_failing_source_is_reported_and_the_others_still_count(caplog: pytest.LogCaptureFixture) -> None:
    bad = FakeSource("bad", ZeroDivisionError("x"), ZeroDivisionError("x"), Reading(battery=0.4))
    sensors = Sensors([bad, FakeSource("good", Reading(source="battery", battery=0.9))])
    sensors.poll()
    sensors.poll()
    assert sensors.failures == {"bad": "ZeroDivisionError: x"}
    assert len(caplog.records) == 1  # said once, not every second
    sensors.poll()
    assert sensors.failures == {}
    state = sensors.state()
    assert state is not None and (state.source, state.battery) == ("battery", 0.4)


def test_it_polls_on_a_thread_of_its_own_and_a_hanging_source_delays_nobody() -> None:
    released, reads = threading.Event(), list[str]()

    class Hanging:
        name = "hanging"

        def read(self) -> Reading:
            reads.append(threading.current_thread().name)
            released.wait(30)
            return Reading()

    with Sensors([Hanging()]) as sensors:
        assert sensors.state() is None  # at once, though the source hangs
    released.set()
    assert reads == ["edgespec-sensor-hanging"]


def test_heat_is_not_forgotten_when_its_sensor_fails() -> None:
    now = [0.0]
    heat = SimulatedSource(
        [(0.0, Reading(thermal="serious")), (2.0, OSError("gone")), (20.0, Reading(thermal="fair"))], clock=lambda: now[0]
    )
    battery = SimulatedSource([(0.0, Reading(battery=0.5)), (9.0, Reading(battery=0.4))], name="battery", clock=lambda: now[0])
    sensors = Sensors([heat, battery], clock=lambda: now[0])
    seen: list[tuple[str, float | None, bool]] = []
    for now[0] in (0.0, 4.0, 10.0, 20.0):
        sensors.poll()
        state = sensors.state()
        assert state is not None
        seen.append((state.thermal, state.battery, state.stale))
    assert seen == [("serious", 0.5, False), ("serious", 0.5, False), ("serious", 0.4, True), ("fair", 0.4, False)]


def test_a_hanging_source_silences_no_other() -> None:
    released, reads = threading.Event(), list[int]()

    class Hanging:
        name = "hanging"

        def read(self) -> Reading:
            reads.append(len(reads))
            released.wait(30)
            return Reading(thermal="critical")

    sensors = Sensors([Hanging(), FakeSource("good", Reading(thermal="fair"), Reading(thermal="serious"))], wait_s=0.001)
    words: list[str] = []
    for _ in range(3):
        sensors.poll()
        state = sensors.state()
        assert state is not None
        words.append(state.thermal)
    released.set()
    assert words == ["fair", "serious", "serious"]
    assert reads == [0]  # and is not asked again while it hangs
    assert sensors.failures == {"hanging": "TimeoutError: an earlier call has not come back yet"}


def test_never_more_than_once_a_second() -> None:
    with pytest.raises(ValueError, match="once a second"):
        Sensors([], period_s=0.5)


def test_the_hottest_word_wins() -> None:
    readings = [Reading(thermal="fair", temperature_c=50), Reading(thermal="critical"), Reading(thermal="nominal", temperature_c=70)]
    state = merge(readings, read_at_s=1.0)
    assert (state.thermal, state.temperature_c, state.source, state.battery) == ("critical", 70, "unknown", None)


@pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows", "Android", "Plan 9"])
def test_default_sources_leave_out_what_is_missing(system: str) -> None:
    sensors = Sensors(default_sources(system))
    sensors.poll()
    assert sensors.failures == {}


class Broken:
    name = "broken"

    def __init__(self) -> None:
        raise OSError("no such library")


class Silent:
    name = "silent"

    def read(self) -> Reading:
        raise ValueError("nan")


class Good:
    name = "good"

    def read(self) -> Reading:
        return Reading(thermal="fair")


def test_trying_the_sources_says_what_each_reads_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sensors_module.MAKERS, "Toaster", (Broken, Silent, Good))
    assert try_sources("Toaster") == {"broken": "OSError: no such library", "silent": "ValueError: nan", "good": Reading(thermal="fair")}
    assert [source.name for source in default_sources("Toaster")] == ["silent", "good"]  # what can be made may work later
    assert try_sources("Plan 9") == {}


def test_trying_a_source_that_hangs_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Stuck:
        name = "stuck"

        def __init__(self) -> None:
            released.wait(30)

    monkeypatch.setitem(sensors_module.MAKERS, "Toaster", (Stuck, Good))
    found = try_sources("Toaster", wait_s=0.001)
    released.set()
    assert str(found["stuck"]).startswith("TimeoutError: no answer within")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have them all")
def test_what_a_mac_has_is_named_elsewhere_with_what_is_missing() -> None:
    found = try_sources("Darwin")
    assert list(found) == ["processinfo", "thermalpressure", "psutil"]
    assert found["processinfo"] == "ImportError: pyobjc-framework-Cocoa is not installed; pip install pyobjc-framework-Cocoa"
    assert "libSystem" in str(found["thermalpressure"])


def test_androids_python_calls_its_system_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getandroidapilevel", lambda: 34, raising=False)
    assert "athermal" in try_sources()
