from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors_other import AndroidSource, PsutilBattery, WindowsSource


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


def test_android_before_headroom_reads_the_status_alone() -> None:
    class Function:
        restype: Any = ctypes.c_int

        def __init__(self, result: int) -> None:
            self.result = result

        def __call__(self, *args: Any) -> int:
            return self.result

    library = SimpleNamespace(AThermal_acquireManager=Function(1), AThermal_getCurrentThermalStatus=Function(0))
    assert AndroidSource(library).read() == Reading(thermal="nominal")


def test_psutil_reads_the_battery() -> None:
    def psutil(battery: Any) -> Any:
        return SimpleNamespace(sensors_battery=lambda: battery)

    assert PsutilBattery(psutil(None)).read() == Reading()
    plugged = SimpleNamespace(percent=101, power_plugged=True)
    assert PsutilBattery(psutil(plugged)).read() == Reading(source="ac", battery=1.0)
    unknown = SimpleNamespace(percent=40, power_plugged=None)
    assert PsutilBattery(psutil(unknown)).read() == Reading(battery=0.4)
    with pytest.raises(ValueError, match="share"):
        PsutilBattery(psutil(SimpleNamespace(percent=float("nan"), power_plugged=True))).read()
