"""A sensor and an energy meter that play a script: for tests, and for trying a policy under heat that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from edgespec.scheduling.readings import Reading


class SimulatedSource:
    """`script`: (seconds since the source was made, what it reads from then on), in order. An exception is raised, not read."""

    def __init__(
        self, script: Sequence[tuple[float, Reading | Exception]], *, name: str = "simulated", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._script, self._clock, self._began_s = name, tuple(script), clock, clock()

    def read(self) -> Reading:
        """Knows nothing before the script's first entry."""
        elapsed_s = self._clock() - self._began_s
        latest = next((answer for from_s, answer in reversed(self._script) if from_s <= elapsed_s), Reading())
        if isinstance(latest, Exception):
            raise latest
        return latest


class SimulatedMeter:
    """Energy at the watts of a script: (seconds since the meter was made, watts from then on), in order; 0 W before the first."""

    def __init__(
        self, script: Sequence[tuple[float, float]], *, name: str = "simulated", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._script, self._clock, self._began_s = name, tuple(script), clock, clock()

    def total_mj(self) -> float:
        elapsed_s = self._clock() - self._began_s
        ends_s = [*(from_s for from_s, _ in self._script[1:]), elapsed_s]
        return sum(
            1000.0 * watts * max(0.0, min(end_s, elapsed_s) - from_s) for (from_s, watts), end_s in zip(self._script, ends_s, strict=False)
        )
