"""What is known of the machine without measuring a model: processors, memory, preset variables, memory bandwidth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

_PRESETS = ("OPENBLAS_", "OMP_", "MKL_", "ORT_", "MLX_", "VECLIB_", "GOMP_", "KMP_")


def cores() -> int:
    """Physical cores this process may use."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return physical
    return min(physical, allowed)


def presets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables set before the start that change how many threads a library takes, or how."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_PRESETS)}


def describe() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": processor(),
        "physical_cores": cores(),
        "logical_cores": psutil.cpu_count(logical=True),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "python": platform.python_version(),
        "preset_variables": presets(),
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Runnable tasks over the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in psutil.getloadavg()]


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def bandwidth_gbs(
    *, threads: int, buffer_bytes: int | None = None, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Memory bandwidth in 10⁹ bytes per second: the best of several sums and copies, on one thread and on `threads`.

    A sum reads each byte once; a copy reads and writes it. The buffer is far larger than the caches. Weights are only read, so
    this bounds decoding from above.
    """
    import numpy as np

    if buffer_bytes is None:
        buffer_bytes = min(768 << 20, psutil.virtual_memory().available // 4)
    n = max(threads, buffer_bytes // 16)  # elements of each half
    source, target = np.ones(n), np.ones(n)  # ones, not zeros: every page must exist

    def total(part: slice) -> None:
        np.add.reduce(source[part])
        np.add.reduce(target[part])

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for parts in {1, threads}:
            slices = [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
            for work in (total, copy):
                for _ in range(rounds):
                    start = clock()
                    list(pool.map(work, slices))
                    best_s = min(best_s, clock() - start)
    return 16 * n / best_s / 1e9
