"""macOS: heat and low-power mode. Written from Apple's headers and documentation; never run on a Mac.

The system has two scales of heat. ProcessInfo's is the documented one, but it calls "fair" what is already heavy throttling;
Darwin's thermal pressure tells the two apart, needs no library and no privileges, but only its header documents it. Both are
read, and the hotter word counts.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from edgespec.core.device import Thermal
from edgespec.scheduling.readings import LEVELS, Reading, library


class MacSource:
    """NSProcessInfo's thermal state and low-power mode. Its four states are ours. Never run on a Mac."""

    name = "processinfo"

    def __init__(self, foundation: Any = None) -> None:
        self._foundation = foundation or library("Foundation", "pyobjc-framework-Cocoa")

    def read(self) -> Reading:
        info = self._foundation.NSProcessInfo.processInfo()
        state = int(info.thermalState())
        if not 0 <= state < len(LEVELS):
            raise OSError(f"NSProcessInfo tells the unknown thermal state {state}")
        return Reading(thermal=LEVELS[state], low_power_mode=bool(info.isLowPowerModeEnabled()))


PRESSURE_NOTIFICATION = b"com.apple.system.thermalpressurelevel"
# OSThermalPressureLevel of libkern/OSThermalNotification.h, as macOS numbers it (iOS uses other numbers).
PRESSURE_LEVELS: dict[int, tuple[str, Thermal]] = {
    0: ("nominal", "nominal"),
    1: ("moderate", "fair"),
    2: ("heavy", "serious"),
    3: ("trapping", "critical"),
    4: ("sleeping", "critical"),
}


class MacPressureSource:
    """Darwin's thermal pressure level, through notify(3) of libSystem. Works without pyobjc. Never run on a Mac."""

    name = "thermalpressure"

    def __init__(self, system: Any = None) -> None:
        """OSError if there is no libSystem here or it refuses the registration, which is cancelled when the source is dropped."""
        self._system = system or ctypes.CDLL("/usr/lib/libSystem.B.dylib")
        register, get_state, cancel = self._system.notify_register_check, self._system.notify_get_state, self._system.notify_cancel
        register.argtypes, register.restype = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)], ctypes.c_uint32
        get_state.argtypes, get_state.restype = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)], ctypes.c_uint32
        cancel.argtypes, cancel.restype = [ctypes.c_int], ctypes.c_uint32
        token = ctypes.c_int()
        _check("notify_register_check", register(PRESSURE_NOTIFICATION, ctypes.byref(token)))
        self._token = token.value
        weakref.finalize(self, cancel, self._token)

    def read(self) -> Reading:
        state = ctypes.c_uint64()
        _check("notify_get_state", self._system.notify_get_state(self._token, ctypes.byref(state)))
        if state.value not in PRESSURE_LEVELS:
            known = ", ".join(f"{level} {name}" for level, (name, _) in PRESSURE_LEVELS.items())
            raise OSError(f"macOS tells the unknown thermal pressure level {state.value}; known are {known}")
        return Reading(thermal=PRESSURE_LEVELS[state.value][1])


def _check(function: str, status: int) -> None:
    if status != 0:  # NOTIFY_STATUS_OK
        raise OSError(f"{function} failed with status {status}")
