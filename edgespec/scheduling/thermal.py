"""How warm a device gets: a Foster network of heat capacities and resistances, in virtual or real time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Stage:
    """One resistance with its capacity: `c_per_w` degrees per watt in the end, reached with time constant `tau_s`."""

    c_per_w: float
    tau_s: float

    def __post_init__(self) -> None:
        if self.c_per_w <= 0 or self.tau_s <= 0:
            raise ValueError(f"a thermal stage needs positive figures, got {self}")


@dataclass(frozen=True, slots=True)
class ThermalModel:
    """Temperature = ambient + Σ stages, each stage relaxing towards watts × its resistance.

    A die that heats in seconds on a case that heats in minutes is two stages.
    """

    ambient_c: float
    stages: tuple[Stage, ...]

    def cold(self) -> ThermalState:
        """At ambient temperature throughout."""
        return ThermalState(self, (0.0,) * len(self.stages))

    def steady_c(self, watts: float) -> float:
        return self.ambient_c + watts * sum(stage.c_per_w for stage in self.stages)

    def watts_at(self, limit_c: float) -> float:
        """The power that holds this temperature for ever."""
        return max(0.0, limit_c - self.ambient_c) / sum(stage.c_per_w for stage in self.stages)


@dataclass(frozen=True, slots=True)
class ThermalState:
    """Rise above ambient of each stage, in degrees."""

    model: ThermalModel
    rise_c: tuple[float, ...]

    @property
    def celsius(self) -> float:
        return self.model.ambient_c + math.fsum(self.rise_c)

    def after(self, watts: float, seconds: float) -> Self:
        """The state when this power has flowed for so long: exact for constant power, however long the step."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        rises = (
            watts * stage.c_per_w + (rise - watts * stage.c_per_w) * math.exp(-seconds / stage.tau_s)
            for stage, rise in zip(self.model.stages, self.rise_c, strict=True)
        )
        return replace(self, rise_c=tuple(rises))

    def at(self, celsius: float) -> Self:
        """The same state shifted to a measured temperature; the slowest stage takes the difference."""
        slowest = max(range(len(self.rise_c)), key=lambda i: self.model.stages[i].tau_s)
        shift = celsius - self.celsius
        return replace(self, rise_c=tuple(rise + shift * (i == slowest) for i, rise in enumerate(self.rise_c)))
