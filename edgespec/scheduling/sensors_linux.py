"""Linux: thermal zones, power supplies, the firmware's power profile, and RAPL energy counters, all read from sysfs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from edgespec.core.device import Thermal
from edgespec.scheduling.readings import Reading, hottest

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
            thermal=hottest(words),
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
                battery = battery if capacity is None else min(1.0, max(0.0, capacity / 100.0))
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
        number = float(_text(path) or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class RaplMeter:
    """Energy of the processor packages since the meter was made, from RAPL counters, which wrap round."""

    name = "rapl"

    def __init__(self, root: Path = Path("/sys")) -> None:
        """OSError if there are no readable counters (since 2020 they are readable by root only)."""
        self._zones = [
            zone
            for zone in sorted(root.glob("class/powercap/intel-rapl:*"))
            if zone.name.count(":") == 1 and _number(zone / "energy_uj") is not None
        ]
        if not self._zones:
            raise OSError(f"no readable RAPL counter under {root / 'class/powercap'}; on most systems only root may read them")
        self._last_uj = self._counters_uj()
        self._total_uj = 0.0

    def total_mj(self) -> float:
        """OSError if a counter cannot be read any more; what it counts meanwhile is in the total once it can."""
        now_uj = self._counters_uj()
        for zone, now, last in zip(self._zones, now_uj, self._last_uj, strict=True):
            step = now - last
            if step < 0:
                step += _number(zone / "max_energy_range_uj") or 0.0
            self._total_uj += max(0.0, step)
        self._last_uj = now_uj
        return self._total_uj / 1000.0

    def _counters_uj(self) -> list[float]:
        return [_counter(zone / "energy_uj") for zone in self._zones]


def _counter(path: Path) -> float:
    value = _number(path)
    if value is None:
        raise OSError(f"{path} cannot be read")
    return value
