"""Where a model's work runs: nodes and share of the cost per unit, as found out and not as asked for.

A device library that was asked for an accelerator may still run nearly every node on the processor, and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgespec.core.engine import Engine
from edgespec.core.errors import CapabilityError

UNITS = ("cpu", "gpu", "npu")
UNKNOWN = "unknown"  # a library that chooses among units, and does not say which it took
_ORDER = (*UNITS, UNKNOWN)
_ROUNDING = 1e-4  # of the sum of shares: files keep six digits


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWork:
    """What one unit does of a pass: `nodes` of the model's graph, `share` of the cost in 0..1; `by`: the parts of the library there."""

    nodes: int
    share: float
    by: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise ValueError(f"nodes must be >= 0, got {self.nodes}")
        if not 0.0 <= self.share <= 1.0 + _ROUNDING:  # also catches NaN
            raise ValueError(f"a share must lie in 0..1, got {self.share}")
        if self.nodes == 0 and self.share > 0.0:
            raise ValueError(f"a unit without nodes has no share of the cost, got {self.share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`units`: by unit ("cpu", "gpu", "npu", or "unknown"), those that have nodes. `source`: how it was found, in words.

    ValueError unless there is a unit and the shares sum to 1.
    """

    units: Mapping[str, UnitWork]
    source: str

    def __post_init__(self) -> None:
        if foreign := sorted(self.units.keys() - set(_ORDER)):
            raise ValueError(f"units are {', '.join(_ORDER)}; got {', '.join(foreign)}")
        total = math.fsum(work.share for work in self.units.values())
        if abs(total - 1.0) > _ROUNDING:
            raise ValueError(f"the shares of all units must sum to 1, got {total:g}")

    @classmethod
    def whole(cls, unit: str, nodes: int, *, by: str, source: str) -> Placement:
        """Everything on one unit."""
        return cls(units={unit: UnitWork(nodes=nodes, share=1.0, by=by)}, source=source)

    @property
    def nodes(self) -> int:
        return sum(work.nodes for work in self.units.values())

    @property
    def label(self) -> str:
        """The unit with the largest share, which is never 0. Of equal ones the humblest: cpu, then gpu, then npu."""
        return max((unit for unit in _ORDER if unit in self.units), key=self.share)

    def share(self, unit: str) -> float:
        """Of the cost, in 0..1."""
        return self.units[unit].share if unit in self.units else 0.0

    def describe(self) -> str:
        """One line: nodes and share of each unit, the largest first, and how that is known."""
        works = sorted(self.units.items(), key=lambda item: -item[1].share)
        names = [f"{unit} ({work.by})" if work.by else unit for unit, work in works]
        parts = [f"{name} {w.nodes} of {self.nodes} nodes, {100 * w.share:.3g}%" for name, (_, w) in zip(names, works, strict=True)]
        return f"{'; '.join(parts)} of the cost; {self.source}"


@runtime_checkable
class Placed(Protocol):
    """An engine that can tell where its work runs. Apart from `Engine`, since a library may keep that to itself."""

    def placement(self) -> Placement:
        """May take as long as loading the model once more. Raises DeviceError or ArtifactError if it cannot be found out."""
        ...


def placement_of(engine: Engine) -> Placement | None:
    """None if the engine cannot tell."""
    return engine.placement() if isinstance(engine, Placed) else None


def check_unit(unit: str) -> None:
    """ValueError for a word that names no unit."""
    if unit not in UNITS:
        raise ValueError(f"the required unit must be {', '.join(UNITS)}; got {unit!r}")


def check_placement(unit: str, target: Engine, draft: Engine | None = None) -> None:
    """CapabilityError unless `unit` does the largest share of the target's or of the draft model's work, as found out now."""
    found: list[str] = []
    for engine in (target, draft):
        if engine is None:
            continue
        placement = placement_of(engine)
        if placement is not None and placement.label == unit:
            return
        found.append(f"{engine.spec.name}: {_falls_short(unit, placement)}")
    raise CapabilityError(f"asked for {unit}, but {'; '.join(found)}. Leave the requirement out to run it as it is")


def _falls_short(unit: str, placement: Placement | None) -> str:
    if placement is None:
        return "its engine cannot tell where its work runs"
    nodes = placement.units[unit].nodes if unit in placement.units else 0
    return f"{nodes} of {placement.nodes} nodes ({100 * placement.share(unit):.3g}% of the cost) run there ({placement.describe()})"
