"""Battery and heat, read on a thread at most once a second. A sensor that fails or hangs never disturbs generation.

Every source answers one question, `read() -> Reading`, and may raise whatever its library raises. The macOS, Windows and
Android sources are written from documentation and have never been run on such a machine.
"""

from __future__ import annotations

import logging
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Self

from edgespec.core.device import PowerThermalState, Thermal
from edgespec.scheduling.aside import Aside
from edgespec.scheduling.meters import default_meter
from edgespec.scheduling.readings import LEVELS, Reading, Source, hottest, why
from edgespec.scheduling.sensors_linux import LinuxSource, RaplMeter
from edgespec.scheduling.sensors_mac import MacPressureSource, MacSource
from edgespec.scheduling.sensors_other import AndroidSource, PsutilBattery, WindowsSource

__all__ = [
    "LEVELS",
    "AndroidSource",
    "LinuxSource",
    "MacPressureSource",
    "MacSource",
    "PsutilBattery",
    "RaplMeter",
    "Reading",
    "Sensors",
    "Source",
    "WindowsSource",
    "default_meter",
    "default_sources",
    "merge",
    "try_sources",
]

log = logging.getLogger(__name__)

LEAST_PERIOD_S = 1.0
STALE_AFTER_S = 5.0
WAIT_S = 1.0  # for one source to answer


class Sensors:
    """All sources together; `state()` never blocks and never raises. A context manager that runs the polling thread.

    Each source is read on a thread of its own, so that one that hangs takes neither the others nor the polling with it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        period_s: float = LEAST_PERIOD_S,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if period_s < LEAST_PERIOD_S:
            raise ValueError(f"sensors are polled at most once a second, got a period of {period_s} s")
        self._asides = [(source.name, Aside(source.read, name=f"edgespec-sensor-{source.name}")) for source in sources]
        self._period_s, self._wait_s, self._clock = period_s, wait_s, clock
        self._latest: dict[str, tuple[Reading, float]] = {}  # source → its latest reading, and when
        self._state: PowerThermalState | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures: dict[str, str] = {}  # source → its latest failure; for reports, cleared when it works again

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="edgespec-sensors", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.2)  # it may wait for a hanging source; it is a daemon

    def state(self) -> PowerThermalState | None:
        """The latest readings, marked stale when any of them is old; None before the first."""
        state = self._state
        if state is None or self._clock() - state.read_at_s <= STALE_AFTER_S:
            return state
        return replace(state, stale=True)

    def poll(self) -> None:
        """Read every source once, in turn. The last reading of one that fails stands, and makes the state grow stale.

        Otherwise a machine whose only heat sensor failed while it was hot would seem to be cool.
        """
        for name, aside in self._asides:
            try:
                self._latest[name] = (aside.call(self._wait_s), self._clock())
                self.failures.pop(name, None)
            except Exception as error:  # whatever a foreign library raises must end here
                if name not in self.failures:
                    log.warning("sensor %s failed and is ignored until it works again: %s", name, error)
                self.failures[name] = why(error)
        latest = [self._latest[name] for name, _ in self._asides if name in self._latest]
        if latest:
            self._state = merge([reading for reading, _ in latest], read_at_s=min(read_at_s for _, read_at_s in latest))

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll()
            self._stop.wait(self._period_s)


def merge(readings: Sequence[Reading], *, read_at_s: float) -> PowerThermalState:
    """First answer wins for power, the hottest for heat."""
    words: list[Thermal] = [reading.thermal for reading in readings if reading.thermal is not None]
    source: Literal["ac", "battery", "unknown"] = "unknown"
    for reading in reversed(readings):
        source = reading.source or source
    degrees = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    return PowerThermalState(
        source=source,
        battery=next((reading.battery for reading in readings if reading.battery is not None), None),
        low_power_mode=any(reading.low_power_mode for reading in readings),
        thermal=hottest(words) or "nominal",
        temperature_c=max(degrees, default=None),
        read_at_s=read_at_s,
    )


MAKERS: dict[str, tuple[Callable[[], Source], ...]] = {
    "Darwin": (MacSource, MacPressureSource, PsutilBattery),
    "Linux": (LinuxSource,),
    "Windows": (WindowsSource,),
    "Android": (AndroidSource, LinuxSource),
}


def _makers(system: str | None) -> tuple[Callable[[], Source], ...]:
    if system is None:  # before Python 3.13 Android calls itself Linux
        system = "Android" if hasattr(sys, "getandroidapilevel") else platform.system()
    return MAKERS.get(system, ())


def default_sources(system: str | None = None) -> list[Source]:
    """The sources that this system has; those whose library is missing are left out, with a log line."""
    sources: list[Source] = []
    for maker in _makers(system):
        try:
            sources.append(maker())
        except Exception as error:  # an absent or broken library means one source less
            log.info("no sensor from %s: %s", getattr(maker, "__name__", maker), error)
    return sources


def try_sources(system: str | None = None, *, wait_s: float = WAIT_S) -> dict[str, Reading | str]:
    """Every source that there is for this system: what it reads now, or why it does not work here."""
    found: dict[str, Reading | str] = {}
    for maker in _makers(system):
        name: str = getattr(maker, "name", str(maker))
        try:
            found[name] = Aside(lambda maker=maker: maker().read(), name=f"edgespec-try-{name}").call(wait_s)
        except Exception as error:
            found[name] = why(error)
    return found
