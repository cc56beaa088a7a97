"""Energy on Apple silicon, from libraries that read the system's IOReport counters without privileges.

Both libraries' interfaces were read in their wheels and sources (zeus-apple-silicon 1.1.0, macmon-lib 0.7.2); neither has been run.
The counters are Apple's own model-based estimates of the chip's parts, not of the whole machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from edgespec.scheduling.readings import library


class ZeusMeter:
    """Processor, GPU, Neural Engine and memory energy from zeus-apple-silicon. Counts whole mJ, from an unspecified fixed point."""

    name = "zeus-apple-silicon"
    FIELDS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj")  # disjoint; a chip may lack some

    def __init__(self, zeus: Any = None) -> None:
        """ImportError without the library, RuntimeError if the system refuses it, OSError if it counts nothing on this chip."""
        self._monitor = (zeus or library("zeus_apple_silicon", "zeus-apple-silicon")).AppleEnergyMonitor()
        first = self._monitor.get_cumulative_energy()
        self._fields = [field for field in self.FIELDS if getattr(first, field) is not None]
        if not self._fields:
            raise OSError("zeus-apple-silicon finds no energy counter on this chip")

    def total_mj(self) -> float:
        """OSError if a counter that was there is gone: a sum without it would seem to run backwards."""
        metrics = self._monitor.get_cumulative_energy()
        total = 0.0
        for field in self._fields:
            value = getattr(metrics, field)
            if value is None:
                raise OSError(f"the counter {field} has gone")
            total += value
        return total


LEAST_INTERVAL_S = 0.1  # a reading walks through all of the machine's sensors


class MacmonMeter:
    """macmon-lib's package watts, each the mean since the reading before, times the seconds between.

    Read at most every `LEAST_INTERVAL_S`; in between the total stands still. Seconds without a reading get the next one's watts.
    """

    name = "macmon-lib"

    def __init__(self, macmon: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """ImportError without the library (two other packages import as `macmon` too); the library's errors if it cannot start."""
        sampler = getattr(macmon or library("macmon", "macmon-lib"), "Sampler", None)
        if sampler is None:
            raise ImportError("the installed package `macmon` is not macmon-lib; uninstall it and pip install macmon-lib")
        self._sampler, self._clock = sampler(), clock
        self._sampler.metrics()
        self._read_at_s, self._total_mj = clock(), 0.0

    def total_mj(self) -> float:
        now_s = self._clock()
        elapsed_s = now_s - self._read_at_s
        if elapsed_s >= LEAST_INTERVAL_S:
            watts = float(self._sampler.metrics().power.package)
            if not 0.0 <= watts < math.inf:
                raise ValueError(f"macmon-lib tells {watts} watts")
            self._total_mj += 1000.0 * watts * elapsed_s
            self._read_at_s = now_s
        return self._total_mj
