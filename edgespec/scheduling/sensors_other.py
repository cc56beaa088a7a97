"""Windows, Android, and what psutil knows on any system. Windows and Android are written from documentation and were never run there."""

from __future__ import annotations

import ctypes
from typing import Any, Literal, cast

from edgespec.core.device import Thermal
from edgespec.scheduling.readings import Reading, library


class PsutilBattery:
    """Battery on any system that psutil knows."""

    name = "psutil"

    def __init__(self, psutil: Any = None) -> None:
        self._read = (psutil or library("psutil", "psutil")).sensors_battery

    def read(self) -> Reading:
        battery = self._read()
        if battery is None:
            return Reading()
        plugged = battery.power_plugged
        share = battery.percent / 100.0
        source: Literal["ac", "battery"] | None = None if plugged is None else "ac" if plugged else "battery"
        return Reading(source=source, battery=1.0 if share > 1.0 else share)  # worn gauges tell a little more than full


class _SystemPowerStatus(ctypes.Structure):
    _fields_ = (
        ("ac_line", ctypes.c_uint8),  # 0 offline, 1 online, 255 unknown
        ("battery_flag", ctypes.c_uint8),
        ("percent", ctypes.c_uint8),  # 255 unknown
        ("saver", ctypes.c_uint8),
        ("life_s", ctypes.c_uint32),
        ("full_life_s", ctypes.c_uint32),
    )


class WindowsSource:
    """GetSystemPowerStatus. Windows has no public heat interface. Never run on Windows."""

    name = "kernel32"

    def __init__(self, kernel32: Any = None) -> None:
        self._library = kernel32 or cast(Any, ctypes).windll.kernel32

    def read(self) -> Reading:
        status = _SystemPowerStatus()
        if not self._library.GetSystemPowerStatus(ctypes.byref(status)):
            raise OSError("GetSystemPowerStatus failed")
        lines: dict[int, Literal["ac", "battery"]] = {0: "battery", 1: "ac"}
        battery = status.percent / 100.0 if status.percent <= 100 else None
        return Reading(source=lines.get(status.ac_line), battery=battery, low_power_mode=bool(status.saver & 1))


_ANDROID: dict[int, Thermal] = {0: "nominal", 1: "fair", 2: "fair", 3: "serious", 4: "critical", 5: "critical", 6: "critical"}
HEADROOM_FAIR = 0.85  # of the way to SEVERE
FORECAST_S = 10


class AndroidSource:
    """AThermal status, and headroom where there is one, from libandroid.so (API 30, 31). Never run on a phone."""

    name = "athermal"

    def __init__(self, libandroid: Any = None) -> None:
        """OSError without the library or a thermal manager, AttributeError before API 30."""
        self._library = libandroid or ctypes.CDLL("libandroid.so")
        self._library.AThermal_acquireManager.restype = ctypes.c_void_p
        self._library.AThermal_getCurrentThermalStatus.argtypes = [ctypes.c_void_p]
        self._headroom = getattr(self._library, "AThermal_getThermalHeadroom", None)  # API 31
        if self._headroom is not None:
            self._headroom.restype = ctypes.c_float
            self._headroom.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._manager = self._library.AThermal_acquireManager()
        if not self._manager:
            raise OSError("no thermal manager")

    def read(self) -> Reading:
        status = int(self._library.AThermal_getCurrentThermalStatus(self._manager))
        if status not in _ANDROID:
            raise OSError(f"thermal status {status}")
        word = _ANDROID[status]
        if word == "nominal" and self._headroom is not None:
            headroom = float(self._headroom(self._manager, FORECAST_S))  # NaN: unsupported, or asked too often
            word = "fair" if headroom >= HEADROOM_FAIR else word
        return Reading(thermal=word)
