"""What a sensor can tell, and the words for heat."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from edgespec.core.device import Thermal

LEVELS: tuple[Thermal, ...] = get_args(Thermal)  # coolest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one source could tell; None where it cannot. ValueError for a battery outside 0..1 or a temperature that is no number."""

    source: Literal["ac", "battery"] | None = None
    battery: float | None = None  # share 0..1
    low_power_mode: bool | None = None
    thermal: Thermal | None = None
    temperature_c: float | None = None

    def __post_init__(self) -> None:
        if self.battery is not None and not 0.0 <= self.battery <= 1.0:
            raise ValueError(f"a battery is filled to a share of 0..1, got {self.battery}")
        if self.temperature_c is not None and not math.isfinite(self.temperature_c):
            raise ValueError(f"a temperature is a finite number, got {self.temperature_c}")


class Source(Protocol):
    """A sensor. Made and read on any thread; may raise whatever its library raises."""

    @property
    def name(self) -> str: ...
    def read(self) -> Reading: ...


def hottest(words: Sequence[Thermal]) -> Thermal | None:
    return LEVELS[max(map(LEVELS.index, words))] if words else None


def library(module: str, package: str) -> Any:
    """The module of an optional library. ImportError with the package to install if it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{package} is not installed; pip install {package}") from error


def why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
