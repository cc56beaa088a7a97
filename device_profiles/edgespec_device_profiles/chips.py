"""A chip file: what is published about one chip, and where each figure comes from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.errors import ArtifactError
from edgespec_device_profiles import toml_text

SCHEMA = "edgespec.chip/1"
Cooling = Literal["phone", "fanless", "fan"]
REQUIRED = frozenset({"bandwidth_gbs", "gpu_fp16_tflops", "performance_cores", "efficiency_cores", "max_memory_gb", "sustained_watts"})
NPU = frozenset({"npu_tops", "npu_fp16_tflops", "npu_bandwidth_gbs", "npu_sram_mb", "npu_dispatch_floor_ms", "npu_busy_w"})
MAY_BE_NONE = frozenset({"efficiency_cores"})  # all else is divided by
FIGURES = REQUIRED | NPU | {"gpu_fp32_tflops", "gpu_cores", "overlap_penalty"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its provenance. `estimate`: derived, recalled or rumoured rather than specified or measured."""

    value: float
    estimate: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip file. `match`: names and model codes that systems report for it; `cooling`: the variants sold."""

    name: str
    chip: str
    year: int
    match: tuple[str, ...]
    cooling: tuple[Cooling, ...]
    figures: Mapping[str, Figure]

    def value(self, figure: str) -> float | None:
        found = self.figures.get(figure)
        return found.value if found else None

    @property
    def estimates(self) -> list[str]:
        return sorted(name for name, figure in self.figures.items() if figure.estimate)

    def device(self, *, os: str = "", memory_bytes: int | None = None) -> DeviceProfile:
        """Priors for the scheduler: bandwidths and floors of the units. No forward times; those are measured or absent."""
        bandwidth = self.value("bandwidth_gbs")
        units = {"cpu": UnitProfile(bandwidth_gbs=bandwidth), "gpu": UnitProfile(bandwidth_gbs=bandwidth)}
        if NPU & self.figures.keys():
            units["npu"] = UnitProfile(
                bandwidth_gbs=self.value("npu_bandwidth_gbs"),
                busy_w=self.value("npu_busy_w"),
                dispatch_floor_ms=self.value("npu_dispatch_floor_ms"),
            )
        return DeviceProfile(
            chip=self.chip,
            os=os,
            memory_bytes=memory_bytes,
            units=units,
            overlap_penalty=self.value("overlap_penalty"),
            estimated=True,
            provenance=f"published priors for {self.chip}, nothing measured here; estimates: {', '.join(self.estimates) or 'none'}",
        )


def parse(text: str, *, origin: str) -> Chip:
    """A chip from TOML. ArtifactError names the file, what is wrong in it and what was expected."""
    table = toml_text.read(text, origin=origin)
    if table.get("schema") != SCHEMA:
        raise ArtifactError(f"{origin}: schema is {table.get('schema')!r}, this version reads {SCHEMA!r}")
    figures = _take(table, "figures", dict, origin)
    unknown, missing = figures.keys() - FIGURES, REQUIRED - figures.keys()
    if unknown or missing:
        raise ArtifactError(f"{origin}: unknown figures {sorted(unknown)}, missing figures {sorted(missing)}")
    cooling = _take(table, "cooling", list, origin)
    if not cooling or not set(cooling) <= set(get_args(Cooling)):
        raise ArtifactError(f"{origin}: cooling is {cooling}, expected some of {list(get_args(Cooling))}")
    match = _take(table, "match", list, origin)
    if not match or not all(isinstance(name, str) and name for name in match):
        raise ArtifactError(f"{origin}: match is {match}, expected names")
    return Chip(
        name=_take(table, "name", str, origin),
        chip=_take(table, "chip", str, origin),
        year=_take(table, "year", int, origin),
        match=tuple(match),
        cooling=cast("tuple[Cooling, ...]", tuple(cooling)),
        figures={name: _figure(name, entry, origin) for name, entry in figures.items()},
    )


def _take(table: Mapping[str, Any], key: str, kind: type[Any], origin: str) -> Any:
    value = table.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ArtifactError(f"{origin}: {key} is {value!r}, expected {kind.__name__}")
    return value


def _figure(name: str, entry: object, origin: str) -> Figure:
    where = f"{origin}: figure {name}"
    if not isinstance(entry, dict) or set(cast("dict[str, Any]", entry)) != {"value", "estimate", "source"}:
        raise ArtifactError(f"{where} is {entry!r}, expected value, estimate and source")
    fields = cast("dict[str, Any]", entry)
    value, estimate, source = fields["value"], fields["estimate"], fields["source"]
    least, wanted = (0.0, ">= 0") if name in MAY_BE_NONE else (sys.float_info.min, "> 0")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
        raise ArtifactError(f"{where}: value is {value!r:.60}, expected a number {wanted}")
    if not isinstance(estimate, bool) or not isinstance(source, str) or not source:
        raise ArtifactError(f"{where}: needs estimate = true or false and a source, got {estimate!r} and {source!r}")
    return Figure(float(value), estimate, source)
