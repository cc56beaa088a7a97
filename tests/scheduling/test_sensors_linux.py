from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.core.device import PowerThermalState
from edgespec.scheduling.readings import Reading
from edgespec.scheduling.sensors import merge
from edgespec.scheduling.sensors_linux import LinuxSource, RaplMeter


def fake_sysfs(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


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


def test_numbers_that_are_none_are_no_readings_and_an_overfull_battery_is_full(tmp_path: Path) -> None:
    files = {"class/thermal/thermal_zone0/temp": "nan", "class/power_supply/BAT0/type": "Battery"}
    files["class/power_supply/BAT0/capacity"] = "103"
    assert LinuxSource(fake_sysfs(tmp_path, files)).read() == Reading(battery=1.0)


def test_rapl_counts_what_was_used_while_it_could_not_be_read(tmp_path: Path) -> None:
    counter = "class/powercap/intel-rapl:0/energy_uj"
    meter = RaplMeter(fake_sysfs(tmp_path, {counter: "0"}))  # a counter that stands at 0 is a counter
    (tmp_path / counter).write_text("")
    with pytest.raises(OSError, match="energy_uj cannot be read"):
        meter.total_mj()
    fake_sysfs(tmp_path, {counter: "7000"})
    assert meter.total_mj() == pytest.approx(7)
