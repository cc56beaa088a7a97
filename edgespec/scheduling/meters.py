"""Energy meters: which one this machine has, and a guard that keeps its failures away from generation."""

from __future__ import annotations

import logging
import math
import platform
import threading
from collections.abc import Callable
from typing import Protocol

from edgespec.scheduling.aside import Aside
from edgespec.scheduling.meters_mac import MacmonMeter, ZeusMeter
from edgespec.scheduling.readings import why
from edgespec.scheduling.sensors_linux import RaplMeter

log = logging.getLogger(__name__)

WAIT_S = 0.1  # a round may lose this much once to a meter that hangs
FIRST_WAIT_S = 2.0


class Meter(Protocol):
    """Energy in mJ since any fixed point. May raise whatever its library raises."""

    @property
    def name(self) -> str: ...
    def total_mj(self) -> float: ...


class GuardedMeter:
    """A meter that starts at 0 mJ, never falls and never raises, whatever the one inside does. Thread-safe.

    When the inner meter raises, hangs or tells no number, the total stands still (`failure` says why, the log says so once) until it
    works again. A step backwards is taken for a counter that began anew: it adds nothing.
    """

    def __init__(self, meter: Meter, *, wait_s: float = WAIT_S) -> None:
        """Raises what the first reading raises, TimeoutError if it hangs, ValueError if it is no number: then there is no meter here."""
        self.name, self._wait_s = meter.name, wait_s
        self._aside = Aside(meter.total_mj, name=f"edgespec-meter-{meter.name}")
        self._lock = threading.Lock()
        self._logged = False
        self._last_mj = self._read(max(wait_s, FIRST_WAIT_S))
        self._total_mj = 0.0
        self.failure: str | None = None  # the latest reading's

    def total_mj(self) -> float:
        with self._lock:
            try:
                now_mj = self._read(self._wait_s)
            except Exception as error:  # whatever a foreign library raises must end here
                self._fail(why(error))
            else:
                if now_mj < self._last_mj:
                    self._fail(f"ran backwards from {self._last_mj:g} to {now_mj:g} mJ")
                else:
                    self.failure = None
                    self._total_mj += now_mj - self._last_mj
                self._last_mj = now_mj
            return self._total_mj

    def _read(self, wait_s: float) -> float:
        value = float(self._aside.call(wait_s))
        if not math.isfinite(value):
            raise ValueError(f"a meter's total is a finite number, got {value}")
        return value

    def _fail(self, reason: str) -> None:
        if not self._logged:
            log.warning("energy meter %s failed; energy figures miss what is used until it works again: %s", self.name, reason)
        self._logged, self.failure = True, reason


MAKERS: dict[str, tuple[Callable[[], Meter], ...]] = {"Linux": (RaplMeter,), "Darwin": (ZeusMeter, MacmonMeter)}  # best first


def try_meters(system: str | None = None) -> dict[str, GuardedMeter | str]:
    """Every meter that there is for this system, best first: the meter, read once, or why it does not work here."""
    found: dict[str, GuardedMeter | str] = {}
    for maker in MAKERS.get(system or platform.system(), ()):
        try:
            meter = maker()
            found[meter.name] = GuardedMeter(meter)
        except Exception as error:  # an absent or broken library means one meter less
            found[getattr(maker, "name", str(maker))] = why(error)
    return found


def default_meter(system: str | None = None) -> Callable[[], float] | None:
    """Millijoules used so far, from the best meter that works here; None where there is none. Never falls, never raises."""
    for name, meter in try_meters(system).items():
        if isinstance(meter, GuardedMeter):
            return meter.total_mj
        log.info("no energy meter %s: %s", name, meter)
    return None
