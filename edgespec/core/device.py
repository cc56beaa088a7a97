"""What is known of the machine: a profile (data, versioned) and its present state. The scheduler reads both, nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

Thermal = Literal["nominal", "fair", "serious", "critical"]  # Apple's own four words


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """One compute unit. `forward_ms[rows][context]` are medians; `forward_p95_ms` likewise. Watts while idle and busy."""

    bandwidth_gbs: float | None = None
    forward_ms: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    forward_p95_ms: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    idle_w: float | None = None
    busy_w: float | None = None
    dispatch_floor_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Priors with provenance until a profiling run on the device replaces them.

    `estimated`: nobody measured this model on this machine. Policies may start from such figures; they must not count on them.
    """

    chip: str
    os: str = ""
    memory_bytes: int | None = None
    units: Mapping[str, UnitProfile] = field(default_factory=dict[str, UnitProfile])
    overlap_penalty: float | None = None  # factor on the target's step while a second unit drafts
    provenance: str = ""
    estimated: bool = False
    schema: str = "edgespec.device/1"

    @classmethod
    def generic(cls) -> Self:
        """Nothing is known: every figure is None, and policies must behave conservatively."""
        return cls(chip="generic", provenance="no profile: nothing measured, nothing assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerThermalState:
    """Battery as a share 0..1 (None: no battery or unknown); `read_at_s` on the caller's clock.

    `temperature_c` is the hottest sensor, where there is one; `stale` says that nothing newer could be read for a while.
    """

    source: Literal["ac", "battery", "unknown"] = "unknown"
    battery: float | None = None
    low_power_mode: bool = False
    thermal: Thermal = "nominal"
    read_at_s: float = 0.0
    temperature_c: float | None = None
    stale: bool = False
