from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.scheduling.meters import try_meters
from edgespec.scheduling.meters_mac import MacmonMeter, ZeusMeter

FIELDS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj")


def metrics(**values: int | None) -> Any:
    """AppleEnergyMetrics: every field is there, None where the chip has no such counter. Cores are counted in the total already."""
    fields = dict.fromkeys((*FIELDS, "efficiency_core_manager_mj", "performance_core_manager_mj"))
    return SimpleNamespace(**{**fields, "performance_cores_mj": [1000, 1000], "efficiency_cluster_mj": [1000], **values})


def zeus(*answers: Any) -> Any:
    left = list(answers)
    monitor = SimpleNamespace(get_cumulative_energy=lambda: left.pop(0))
    return SimpleNamespace(AppleEnergyMonitor=lambda: monitor)


def test_zeus_adds_up_the_parts_of_the_chip() -> None:
    now = metrics(cpu_total_mj=100, gpu_mj=20, gpu_sram_mj=3, ane_mj=4, dram_mj=50)
    assert ZeusMeter(zeus(now, now)).total_mj() == 177


def test_zeus_does_without_counters_that_the_chip_lacks() -> None:
    meter = ZeusMeter(zeus(metrics(cpu_total_mj=1, gpu_mj=1), metrics(cpu_total_mj=7, gpu_mj=2, dram_mj=900)))
    assert meter.total_mj() == 9  # one that comes later would look like a sudden rush of energy


def test_zeus_says_which_counter_has_gone() -> None:
    meter = ZeusMeter(zeus(metrics(cpu_total_mj=1, ane_mj=1), metrics(cpu_total_mj=2), metrics(cpu_total_mj=3, ane_mj=3)))
    with pytest.raises(OSError, match="ane_mj has gone"):
        meter.total_mj()
    assert meter.total_mj() == 6


def test_zeus_without_counters_or_subscription_is_no_meter() -> None:
    with pytest.raises(OSError, match="no energy counter"):
        ZeusMeter(zeus(metrics()))

    def refuse() -> Any:
        raise RuntimeError("Failed to create IOReport subscription.")

    with pytest.raises(RuntimeError, match="subscription"):
        ZeusMeter(SimpleNamespace(AppleEnergyMonitor=refuse))


class FakeMacmon:
    """macmon-lib: `Sampler().metrics()` gives the mean watts since the call before."""

    def __init__(self, *watts: Any) -> None:
        self.watts, self.reads = list(watts), 0
        self.Sampler = lambda: self

    def metrics(self) -> Any:
        self.reads += 1
        watts = self.watts.pop(0)
        if isinstance(watts, Exception):
            raise watts
        return SimpleNamespace(power=SimpleNamespace(package=watts))


def test_macmon_watts_times_seconds() -> None:
    now = [10.0]
    meter = MacmonMeter(FakeMacmon(99.0, 5.0, 20.0), clock=lambda: now[0])
    assert meter.total_mj() == 0  # what was before the meter is not its own
    now[0] = 12.0
    assert meter.total_mj() == pytest.approx(10_000)
    now[0] = 12.5
    assert meter.total_mj() == pytest.approx(20_000)


def test_macmon_is_not_read_more_often_than_it_can_bear() -> None:
    now = [0.0]
    macmon = FakeMacmon(1.0, 1.0, 1.0)
    meter = MacmonMeter(macmon, clock=lambda: now[0])
    for i in range(1, 15):
        now[0] = i / 100
        meter.total_mj()
    assert macmon.reads == 2  # at the start, and after a tenth of a second
    now[0] = 1.0
    assert meter.total_mj() == pytest.approx(1000)  # and no time is lost


def test_macmon_fills_in_for_readings_that_failed() -> None:
    now = [0.0]
    meter = MacmonMeter(FakeMacmon(0.0, RuntimeError("sampling failed"), 3.0), clock=lambda: now[0])
    now[0] = 1.0
    with pytest.raises(RuntimeError, match="sampling failed"):
        meter.total_mj()
    now[0] = 2.0
    assert meter.total_mj() == pytest.approx(6000)


@pytest.mark.parametrize("watts", [float("nan"), float("inf"), -1.0])
def test_macmon_watts_that_cannot_be_spoil_no_total(watts: float) -> None:
    now = [0.0]
    meter = MacmonMeter(FakeMacmon(0.0, watts, 2.0), clock=lambda: now[0])
    now[0] = 1.0
    with pytest.raises(ValueError, match="watts"):
        meter.total_mj()
    now[0] = 2.0
    assert meter.total_mj() == pytest.approx(4000)


def test_another_package_of_that_name_is_not_taken_for_it() -> None:
    with pytest.raises(ImportError, match="not macmon-lib"):
        MacmonMeter(SimpleNamespace())


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have them")
def test_elsewhere_the_libraries_are_named() -> None:
    found = try_meters("Darwin")
    assert found["zeus-apple-silicon"] == "ImportError: zeus-apple-silicon is not installed; pip install zeus-apple-silicon"
    assert found["macmon-lib"] == "ImportError: macmon-lib is not installed; pip install macmon-lib"


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac; this test has never run")
def test_a_real_mac_uses_energy() -> None:
    """Has never run: it was written without a Mac."""
    pytest.importorskip("zeus_apple_silicon")
    meter = ZeusMeter()
    before = meter.total_mj()
    sum(i * i for i in range(10_000_000))
    assert meter.total_mj() > before
