"""A device in virtual time: work takes the milliseconds, joules and degrees that a model of the device says, not this machine's.

`VirtualDevice` is the clock, the meter and the throttle; `SimulatedEngine` lets any real engine's work be charged to it.
Nothing here is random. How good the figures are is up to whoever provides them; simulated results are estimates and say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from edgespec.core.cancel import CancelToken
from edgespec.core.device import PowerThermalState, Thermal
from edgespec.core.engine import Cache, Capabilities, Engine, ModelSpec, Scores, TokenBatch


class Heat(Protocol):
    """A thermal state that can be moved on."""

    @property
    def celsius(self) -> float: ...
    def after(self, watts: float, seconds: float) -> Self: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """How the system slows a hot device: speed falls while it is above `limit_c` and recovers below `limit_c − band_c`.

    `exponent`: power ∝ speed^exponent. Words: fair within `fair_c` below the limit, serious at it, critical `critical_c` above.
    """

    limit_c: float
    band_c: float = 0.5
    exponent: float = 1.3
    fall_per_s: float = 0.1
    rise_per_s: float = 0.05
    slowest: float = 0.1
    fair_c: float = 5.0
    critical_c: float = 8.0

    def speed(self, speed: float, celsius: float, seconds: float) -> float:
        if celsius > self.limit_c:
            return max(self.slowest, speed * math.exp(-self.fall_per_s * seconds))
        if celsius < self.limit_c - self.band_c:
            return min(1.0, speed * math.exp(self.rise_per_s * seconds))
        return speed

    def word(self, celsius: float) -> Thermal:
        over = celsius - self.limit_c
        return "critical" if over >= self.critical_c else "serious" if over >= 0 else "fair" if over >= -self.fair_c else "nominal"


STEP_S = 0.25  # the throttle looks at the temperature this often


class VirtualDevice:
    """One chip in one case. `busy_w[unit]` at full speed, on top of `idle_w`."""

    def __init__(self, *, heat: Heat, busy_w: Mapping[str, float], idle_w: float, throttle: Throttle) -> None:
        self.busy_w, self._idle_w, self._throttle = dict(busy_w), idle_w, throttle
        self.heat, self.speed = heat, 1.0
        self.clock_s = self.energy_mj = 0.0
        self.peak_c = heat.celsius

    def work(self, unit: str, nominal_ms: float) -> float:
        """Do what takes `nominal_ms` at full speed on this unit; returns the virtual ms it took. KeyError for an unknown unit."""
        busy_w, elapsed_ms, left_ms = self.busy_w[unit], 0.0, nominal_ms
        while left_ms > 0:
            step_ms = min(left_ms / self.speed, STEP_S * 1e3)
            left_ms -= step_ms * self.speed
            elapsed_ms += step_ms
            self._pass(step_ms, self._idle_w + busy_w * self.speed**self._throttle.exponent)
            if left_ms < 1e-9:
                break
        return elapsed_ms

    def rest(self, ms: float) -> None:
        while ms > 0:
            step_ms = min(ms, STEP_S * 1e3)
            ms -= step_ms
            self._pass(step_ms, self._idle_w)

    @property
    def critical_c(self) -> float:
        """Where the system would call its state critical."""
        return self._throttle.limit_c + self._throttle.critical_c

    def state(self) -> PowerThermalState:
        celsius = self.heat.celsius
        return PowerThermalState(thermal=self._throttle.word(celsius), temperature_c=celsius, read_at_s=self.clock_s)

    def _pass(self, ms: float, watts: float) -> None:
        seconds = ms / 1e3
        self.heat = self.heat.after(watts, seconds)
        self.clock_s += seconds
        self.energy_mj += watts * ms
        self.peak_c = max(self.peak_c, self.heat.celsius)
        self.speed = self._throttle.speed(self.speed, self.heat.celsius, seconds)


class SimulatedEngine:
    """`engine`'s answers, charged to a virtual device: `cost_ms(rows, context)` at full speed on `unit`."""

    def __init__(self, engine: Engine, device: VirtualDevice, unit: str, cost_ms: Callable[[int, int], float]) -> None:
        self._engine, self._device, self._unit, self._cost_ms = engine, device, unit, cost_ms

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    def new_cache(self, capacity: int) -> Cache:
        return self._engine.new_cache(capacity)

    def forward(
        self, work: Sequence[tuple[TokenBatch, Cache]], *, features: bool = False, cancel: CancelToken | None = None
    ) -> list[Scores]:
        scores = self._engine.forward(work, features=features, cancel=cancel)
        rows = sum(len(batch) for batch, _ in work)
        self._device.work(self._unit, self._cost_ms(rows, max(cache.length for _, cache in work)))
        return scores

    def close(self) -> None:
        self._engine.close()
