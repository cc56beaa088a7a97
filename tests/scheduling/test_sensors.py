from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.core.device import PowerThermalState
from edgespec.scheduling.sensors import (
    AndroidSource,
    LinuxSource,
    MacSource,
    PsutilBattery,
    RaplMeter,
    Reading,
    Sensors,
    WindowsSource,
    default_sources,
    merge,
)


def fake_sysfs(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


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
    assert reads == ["edgespec-sensors"]


def test_never_more_than_once_a_second() -> None:
    with pytest.raises(ValueError, match="once a second"):
        Sensors([], period_s=0.5)


def test_the_hottest_word_wins() -> None:
    readings = [Reading(thermal="fair", temperature_c=50), Reading(thermal="critical"), Reading(thermal="nominal", temperature_c=70)]
    state = merge(readings, read_at_s=1.0)
    assert (state.thermal, state.temperature_c, state.source, state.battery) == ("critical", 70, "unknown", None)


@pytest.mark.parametrize(
    ("milli", "word"), [(40_000, "nominal"), (71_000, "fair"), (80_000, "serious"), (94_000, "serious"), (95_000, "critical")]
)
def test_linux_zones_are_judged_by_their_own_trip_points(tmp_path: Path, milli: int, word: str) -> None:
    zone = "class/thermal/thermal_zone0/"
    files = {f"{zone}temp": str(milli), f"{zone}trip_point_0_type": "passive", f"{zone}trip_point_0_temp": "80000"}
    files |= {f"{zone}trip_point_1_type": "critical", f"{zone}trip_point_1_temp": "95000"}
    reading = LinuxSource(fake_sysfs(tmp_path, files)).read()
    assert (reading.thermal, reading.temperature_c) == (word, milli / 1000)


def test_linux_without_trip_points_uses_cautious_ones(tmp_path: Path) -> None:
    files = {"class/thermal/thermal_zone0/temp": "85000", "class/thermal/thermal_zone1/temp": "-274000"}
    assert LinuxSource(fake_sysfs(tmp_path, files)).read().thermal == "fair"


def test_linux_battery(tmp_path: Path) -> None:
    supply = "class/power_supply/"
    files = {f"{supply}BAT0/type": "Battery", f"{supply}BAT0/capacity": "37", f"{supply}BAT0/status": "Discharging"}
    files |= {f"{supply}AC/type": "Mains", f"{supply}AC/online": "0", "firmware/acpi/platform_profile": "low-power"}
    files |= {f"{supply}mouse/type": "Battery", f"{supply}mouse/scope": "Device", f"{supply}mouse/capacity": "5"}
    reading = LinuxSource(fake_sysfs(tmp_path, files)).read()
    assert (reading.source, reading.battery, reading.low_power_mode) == ("battery", 0.37, True)
    fake_sysfs(tmp_path, {f"{supply}AC/online": "1"})
    assert LinuxSource(tmp_path).read().source == "ac"


def test_an_empty_machine_reads_as_unknown(tmp_path: Path) -> None:
    assert LinuxSource(tmp_path).read() == Reading()
    state = merge([Reading()], read_at_s=0.0)
    assert state == PowerThermalState()


def test_unreadable_files_are_no_readings(tmp_path: Path) -> None:
    files = {"class/thermal/thermal_zone0/temp": "", "class/power_supply/BAT0/type": "Battery", "class/power_supply/BAT0/capacity": "?"}
    assert LinuxSource(fake_sysfs(tmp_path, files)).read() == Reading()


def test_rapl_counts_from_its_start_and_over_the_wrap(tmp_path: Path) -> None:
    zone = "class/powercap/intel-rapl:0/"
    fake_sysfs(tmp_path, {f"{zone}energy_uj": "900000", f"{zone}max_energy_range_uj": "1000000"})
    fake_sysfs(tmp_path, {"class/powercap/intel-rapl:0:0/energy_uj": "5"})  # a part of the package, counted in it already
    meter = RaplMeter(tmp_path)
    assert meter.total_mj() == 0
    fake_sysfs(tmp_path, {f"{zone}energy_uj": "950000"})
    assert meter.total_mj() == pytest.approx(50)
    fake_sysfs(tmp_path, {f"{zone}energy_uj": "20000"})
    assert meter.total_mj() == pytest.approx(120)
    with pytest.raises(OSError, match="no readable RAPL"):
        RaplMeter(tmp_path / "none")


def test_mac_states_are_our_words() -> None:
    class Info:
        state, saving = 2, True

        def thermalState(self) -> int:
            return self.state

        def isLowPowerModeEnabled(self) -> bool:
            return self.saving

    foundation = SimpleNamespace(NSProcessInfo=SimpleNamespace(processInfo=Info))
    assert MacSource(foundation).read() == Reading(thermal="serious", low_power_mode=True)


def test_windows_power_status() -> None:
    def status(ac: int, percent: int, saver: int) -> Any:
        def fill(pointer: Any) -> int:
            target = pointer._obj
            target.ac_line, target.percent, target.saver = ac, percent, saver
            return 1

        return SimpleNamespace(GetSystemPowerStatus=fill)

    assert WindowsSource(status(0, 55, 1)).read() == Reading(source="battery", battery=0.55, low_power_mode=True)
    assert WindowsSource(status(255, 255, 0)).read() == Reading(low_power_mode=False)
    with pytest.raises(OSError, match="GetSystemPowerStatus"):
        WindowsSource(SimpleNamespace(GetSystemPowerStatus=lambda pointer: 0)).read()


HEADROOMS = [(0, 0.2, "nominal"), (0, 0.9, "fair"), (0, float("nan"), "nominal"), (3, 1.2, "serious"), (6, 1, "critical")]


@pytest.mark.parametrize(("status", "headroom", "word"), HEADROOMS)
def test_android_status_and_headroom(status: int, headroom: float, word: str) -> None:
    class Function:
        def __init__(self, result: float) -> None:
            self.result = result
            self.restype: Any = ctypes.c_int

        def __call__(self, *args: Any) -> float:
            return self.result

    def library(manager: int, status: int) -> Any:
        return SimpleNamespace(
            AThermal_acquireManager=Function(manager),
            AThermal_getCurrentThermalStatus=Function(status),
            AThermal_getThermalHeadroom=Function(headroom),
        )

    assert AndroidSource(library(1, status)).read().thermal == word
    with pytest.raises(OSError, match="no thermal manager"):
        AndroidSource(library(0, 0))
    with pytest.raises(OSError, match="thermal status -1"):
        AndroidSource(library(1, -1)).read()


def test_psutil_reads_or_says_nothing() -> None:
    assert isinstance(PsutilBattery().read(), Reading)


@pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows", "Android", "Plan 9"])
def test_default_sources_leave_out_what_is_missing(system: str) -> None:
    sensors = Sensors(default_sources(system))
    sensors.poll()
    assert sensors.failures == {}
