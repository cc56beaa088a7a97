"""Battery and heat, read on a thread at most once a second. A sensor that fails or hangs never disturbs generation.

Every source answers one question, `read() -> Reading`, and may raise whatever its library raises. The macOS, Windows and
Android sources are written from documentation and have never been run on such a machine.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast, get_args

from edgespec.core.device import PowerThermalState, Thermal

log = logging.getLogger(__name__)

LEAST_PERIOD_S = 1.0
STALE_AFTER_S = 5.0
LEVELS: tuple[Thermal, ...] = get_args(Thermal)  # coolest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one source could tell; None where it cannot."""

    source: Literal["ac", "battery"] | None = None
    battery: float | None = None  # share 0..1
    low_power_mode: bool | None = None
    thermal: Thermal | None = None
    temperature_c: float | None = None


class Source(Protocol):
    @property
    def name(self) -> str: ...
    def read(self) -> Reading: ...


class Sensors:
    """All sources together; `state()` never blocks and never raises. A context manager that runs the polling thread."""

    def __init__(self, sources: Sequence[Source], *, period_s: float = LEAST_PERIOD_S, clock: Callable[[], float] = time.monotonic) -> None:
        if period_s < LEAST_PERIOD_S:
            raise ValueError(f"sensors are polled at most once a second, got a period of {period_s} s")
        self._sources, self._period_s, self._clock = tuple(sources), period_s, clock
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
            self._thread.join(timeout=0.2)  # a hanging source is left to its daemon thread

    def state(self) -> PowerThermalState | None:
        """The latest reading, marked stale when it is old; None before the first."""
        state = self._state
        if state is None or self._clock() - state.read_at_s <= STALE_AFTER_S:
            return state
        return replace(state, stale=True)

    def poll(self) -> None:
        """Read every source once, on the calling thread. If none answers, the last state stands and grows stale."""
        readings: list[Reading] = []
        for source in self._sources:
            try:
                readings.append(source.read())
                self.failures.pop(source.name, None)
            except Exception as error:  # whatever a foreign library raises must end here
                if source.name not in self.failures:
                    log.warning("sensor %s failed and is ignored until it works again: %s", source.name, error)
                self.failures[source.name] = f"{type(error).__name__}: {error}"
        if readings:
            self._state = merge(readings, read_at_s=self._clock())

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll()
            self._stop.wait(self._period_s)


def _hottest(words: Sequence[Thermal]) -> Thermal | None:
    return LEVELS[max(map(LEVELS.index, words))] if words else None


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
        thermal=_hottest(words) or "nominal",
        temperature_c=max(degrees, default=None),
        read_at_s=read_at_s,
    )


def default_sources(system: str | None = None) -> list[Source]:
    """The sources that this system has; those whose library is missing are left out, with a log line."""
    makers: dict[str, tuple[Callable[[], Source], ...]] = {
        "Darwin": (MacSource, PsutilBattery),
        "Linux": (LinuxSource,),
        "Windows": (WindowsSource,),
        "Android": (AndroidSource, LinuxSource),
    }
    sources: list[Source] = []
    for maker in makers.get(system or platform.system(), ()):
        try:
            sources.append(maker())
        except Exception as error:  # an absent or broken library means one source less
            log.info("no sensor from %s: %s", getattr(maker, "__name__", maker), error)
    return sources


def default_meter() -> Callable[[], float] | None:
    """Millijoules used so far, from the first meter that works here; None where there is none."""
    if platform.system() != "Linux":
        return None
    try:
        return RaplMeter().total_mj
    except OSError as error:
        log.info("no energy meter: %s", error)
        return None


# --- Linux -----------------------------------------------------------------------------------------------------------

ASSUMED_TRIPS_C = {"passive": 90.0, "critical": 100.0}  # for zones that state no trip points
FAIR_BELOW_PASSIVE_C = 10.0


class LinuxSource:
    """Thermal zones with their own trip points, mains and battery, the firmware's power profile. `root`: where sysfs is."""

    name = "sysfs"

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def read(self) -> Reading:
        zones: list[tuple[float, Thermal]] = [
            zone for zone in map(_zone, sorted(self._root.glob("class/thermal/thermal_zone*"))) if zone is not None
        ]
        words: list[Thermal] = [word for _, word in zones]
        source, battery = self._power()
        profile = _text(self._root / "firmware/acpi/platform_profile")
        return Reading(
            source=source,
            battery=battery,
            low_power_mode=None if profile is None else profile in ("low-power", "quiet"),
            thermal=_hottest(words),
            temperature_c=max((degrees for degrees, _ in zones), default=None),
        )

    def _power(self) -> tuple[Literal["ac", "battery"] | None, float | None]:
        source: Literal["ac", "battery"] | None = None
        battery: float | None = None
        for supply in sorted(self._root.glob("class/power_supply/*")):
            kind = _text(supply / "type")
            if kind in ("Mains", "USB") and _text(supply / "online") == "1":
                source = "ac"
            elif kind == "Battery" and _text(supply / "scope") != "Device":  # a mouse's battery is not ours
                capacity = _number(supply / "capacity")
                battery = battery if capacity is None else capacity / 100.0
                if source is None and _text(supply / "status") == "Discharging":
                    source = "battery"
        return source, battery


def _zone(path: Path) -> tuple[float, Thermal] | None:
    """(°C, word) of one thermal zone, or None if it cannot be read."""
    milli = _number(path / "temp")
    if milli is None or milli <= -100_000:  # absent sensors report absolute nonsense
        return None
    trips = {**ASSUMED_TRIPS_C, **_trips(path)}
    degrees = milli / 1000.0
    if degrees >= trips["critical"]:
        return degrees, "critical"
    if degrees >= min(trips["passive"], trips.get("hot", math.inf)):
        return degrees, "serious"
    return degrees, "fair" if degrees >= trips["passive"] - FAIR_BELOW_PASSIVE_C else "nominal"


def _trips(path: Path) -> dict[str, float]:
    """The lowest °C of each kind of trip point ("passive", "hot", "critical")."""
    trips: dict[str, float] = {}
    for kind_file in path.glob("trip_point_*_type"):
        kind, milli = _text(kind_file), _number(kind_file.with_name(kind_file.name.replace("_type", "_temp")))
        if kind in ("passive", "hot", "critical") and milli is not None and milli > 0:
            trips[kind] = min(trips.get(kind, math.inf), milli / 1000.0)
    return trips


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


class RaplMeter:
    """Energy of the processor packages since the meter was made, from RAPL counters, which wrap round."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        """OSError if there are no readable counters (since 2020 they are readable by root only)."""
        self._zones = [
            zone for zone in sorted(root.glob("class/powercap/intel-rapl:*")) if zone.name.count(":") == 1 and _number(zone / "energy_uj")
        ]
        if not self._zones:
            raise OSError(f"no readable RAPL counter under {root / 'class/powercap'}")
        self._last = [self._counter(zone) for zone in self._zones]
        self._total_uj = 0.0

    def total_mj(self) -> float:
        for i, zone in enumerate(self._zones):
            now = self._counter(zone)
            step = now - self._last[i]
            if step < 0:
                step += _number(zone / "max_energy_range_uj") or 0.0
            self._total_uj += max(0.0, step)
            self._last[i] = now
        return self._total_uj / 1000.0

    def _counter(self, zone: Path) -> float:
        value = _number(zone / "energy_uj")
        return math.nan if value is None else value


# --- other systems ---------------------------------------------------------------------------------------------------


class PsutilBattery:
    """Battery on any system that psutil knows."""

    name = "psutil"

    def __init__(self) -> None:
        self._read = importlib.import_module("psutil").sensors_battery

    def read(self) -> Reading:
        battery = self._read()
        if battery is None:
            return Reading()
        plugged = battery.power_plugged
        return Reading(source=None if plugged is None else "ac" if plugged else "battery", battery=battery.percent / 100.0)


class MacSource:
    """NSProcessInfo's thermal state and low-power mode. Its four states are ours. Never run on a Mac."""

    name = "processinfo"

    def __init__(self, foundation: Any = None) -> None:
        self._foundation = foundation or importlib.import_module("Foundation")  # pyobjc-framework-Cocoa

    def read(self) -> Reading:
        info = self._foundation.NSProcessInfo.processInfo()
        return Reading(thermal=LEVELS[int(info.thermalState())], low_power_mode=bool(info.isLowPowerModeEnabled()))


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

    def __init__(self, library: Any = None) -> None:
        self._library = library or cast(Any, ctypes).windll.kernel32

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
    """AThermal status and headroom from libandroid.so (API 30, 31). Never run on a phone."""

    name = "athermal"

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libandroid.so")
        self._library.AThermal_acquireManager.restype = ctypes.c_void_p
        self._library.AThermal_getThermalHeadroom.restype = ctypes.c_float
        self._library.AThermal_getThermalHeadroom.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._library.AThermal_getCurrentThermalStatus.argtypes = [ctypes.c_void_p]
        self._manager = self._library.AThermal_acquireManager()
        if not self._manager:
            raise OSError("no thermal manager")

    def read(self) -> Reading:
        status = int(self._library.AThermal_getCurrentThermalStatus(self._manager))
        if status not in _ANDROID:
            raise OSError(f"thermal status {status}")
        word = _ANDROID[status]
        headroom = float(self._library.AThermal_getThermalHeadroom(self._manager, FORECAST_S))  # NaN: unsupported or too often
        return Reading(thermal="fair" if word == "nominal" and headroom >= HEADROOM_FAIR else word)
