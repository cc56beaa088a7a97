from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors_mac import MacPressureSource, MacSource


def test_mac_states_are_our_words() -> None:
    class Info:
        state, saving = 2, True

        def thermalState(self) -> int:
            return self.state

        def isLowPowerModeEnabled(self) -> bool:
            return self.saving

    foundation = SimpleNamespace(NSProcessInfo=SimpleNamespace(processInfo=Info))
    assert MacSource(foundation).read() == Reading(thermal="serious", low_power_mode=True)


def test_a_state_that_mac_os_has_not_yet_is_a_failure_not_a_reading() -> None:
    info = SimpleNamespace(thermalState=lambda: 4, isLowPowerModeEnabled=lambda: False)
    foundation = SimpleNamespace(NSProcessInfo=SimpleNamespace(processInfo=lambda: info))
    with pytest.raises(OSError, match="unknown thermal state 4"):
        MacSource(foundation).read()


class Function:
    """A C function of a ctypes library: it has types, and can be called."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: Any = None
        self.restype: Any = ctypes.c_int

    def __call__(self, *args: Any) -> int:
        return self._call(*args)


class FakeSystem:
    """notify(3) of libSystem."""

    def __init__(self, level: int = 0, *, register: int = 0, get_state: int = 0) -> None:
        self.level, self.register, self.get_state = level, register, get_state
        self.registered: list[bytes] = []
        self.cancelled: list[int] = []
        self.notify_register_check = Function(self._register)
        self.notify_get_state = Function(self._get_state)
        self.notify_cancel = Function(self._cancel)

    def _register(self, name: bytes, token: Any) -> int:
        self.registered.append(name)
        token._obj.value = 41
        return self.register

    def _get_state(self, token: int, state: Any) -> int:
        assert token == 41
        state._obj.value = self.level
        return self.get_state

    def _cancel(self, token: int) -> int:
        self.cancelled.append(token)
        return 0


PRESSURES = [(0, "nominal"), (1, "fair"), (2, "serious"), (3, "critical"), (4, "critical")]


@pytest.mark.parametrize(("level", "word"), PRESSURES)
def test_thermal_pressure_is_read_without_any_library(level: int, word: str) -> None:
    system = FakeSystem(level)
    assert MacPressureSource(system).read() == Reading(thermal=word)  # type: ignore[arg-type]
    assert system.registered == [b"com.apple.system.thermalpressurelevel"]
    # A state is 64 bits wide and a status unsigned; ctypes would guess otherwise.
    assert system.notify_get_state.argtypes == [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
    assert system.notify_get_state.restype is ctypes.c_uint32


def test_a_refused_registration_means_no_such_sensor() -> None:
    with pytest.raises(OSError, match="notify_register_check failed with status 1000000"):
        MacPressureSource(FakeSystem(register=1_000_000))


def test_a_state_that_cannot_be_read_is_a_failure_and_a_later_one_a_reading() -> None:
    system = FakeSystem(2, get_state=2)
    source = MacPressureSource(system)
    with pytest.raises(OSError, match="notify_get_state failed with status 2"):
        source.read()
    system.get_state = 0
    assert source.read().thermal == "serious"


@pytest.mark.parametrize("level", [5, 30, 2**64 - 1])
def test_an_unknown_level_is_named(level: int) -> None:
    with pytest.raises(OSError, match=f"unknown thermal pressure level {level}; known are 0 nominal, 1 moderate"):
        MacPressureSource(FakeSystem(level)).read()


def test_the_registration_is_cancelled_with_the_source() -> None:
    system = FakeSystem()
    source = MacPressureSource(system)
    source.read()
    assert system.cancelled == []
    del source
    gc.collect()
    assert system.cancelled == [41]


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has it")
def test_elsewhere_there_is_no_lib_system() -> None:
    with pytest.raises(OSError, match="libSystem"):
        MacPressureSource()


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac; this test has never run")
def test_a_real_mac_tells_its_heat() -> None:
    """Has never run: it was written without a Mac."""
    assert MacPressureSource().read().thermal is not None
    pytest.importorskip("Foundation")
    reading = MacSource().read()
    assert reading.thermal is not None and reading.low_power_mode is not None
