"""A measured profile: what a profiling run found on one machine with one model, and its form on disk.

The file is TOML, so that people can read and mend it; what is missing was not measured, and `not_measured` says why.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from edgespec.analysis import measured_cost
from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.errors import ArtifactError
from edgespec.core.placement import Placement
from edgespec_device_profiles import toml_text

SCHEMA = "edgespec.profile/1"
OTHER_CONTEXT, OTHER_ROWS = 16, (1, 4, 8)  # at which other engines are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`name` is the folder its profiles lie in; two machines that look alike share it."""

    name: str
    processor: str
    system: str = ""
    cores: int = 1
    memory_bytes: int | None = None
    load_before: float | None = None  # runnable tasks before the run: what else kept the machine busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`unit` does the largest share of the work, or is "unknown"; `placement` says how much and how that is known."""

    name: str
    engine: str
    unit: str
    weight_bytes: int
    kv_bytes_per_token: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """What guessing costs. `ms_per_token` over rounds that guessed, `miss_ms` for a round that had no guess to offer.

    `forward_ms[context]`: one row of the draft model, where there is one.
    """

    name: str
    unit: str = ""
    ms_per_token: float | None = None
    miss_ms: float | None = None
    forward_ms: Mapping[int, float] = field(default_factory=dict[int, float])
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of text, from real answers. Entry i of the tuples belongs to draft position i + 1."""

    rounds: int = 0  # that asked for a draft
    offered: tuple[int, ...] = ()  # rounds whose draft had at least so many tokens
    tested: tuple[int, ...] = ()  # drafted tokens whose predecessors were all accepted
    kept: tuple[int, ...] = ()
    context: float = 0.0  # mean tokens in the cache
    planned: Mapping[int, int] = field(default_factory=dict[int, int])  # draft length the policy chose -> rounds
    reason: str = ""  # the policy's last


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the sustained phase. `at_s`: since the phase began; `mode`: "plain" or "speculative"."""

    at_s: float
    kind: str
    mode: str
    tok_s: float
    thermal: str | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """The same model on another engine: `forward_ms[rows]` at a short context."""

    unit: str
    forward_ms: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that one run found. Times are medians; hot samples are counted, never used."""

    schema: str = SCHEMA
    date: str  # ISO 8601, UTC
    complete: bool  # false: interrupted, or too hot to measure
    machine: Machine
    model: Model
    draft: DraftCost
    policy: str
    units: Mapping[str, UnitProfile] = field(default_factory=dict[str, UnitProfile])
    engines: Mapping[str, Elsewhere] = field(default_factory=dict[str, Elsewhere])  # others that run this model here
    overlap_penalty: float | None = None
    other_ms: float | None = None  # of a round: planning, judging, committing, text
    energy_mj_per_token: Mapping[str, float] = field(default_factory=dict[str, float])  # by mode
    prediction_error: float | None = None  # median relative error of these figures on the rounds of the sustained phase
    hot_samples: int = 0
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    sustained: tuple[Answer, ...] = ()
    not_measured: Mapping[str, str] = field(default_factory=dict[str, str])  # what -> why

    @property
    def unit(self) -> UnitProfile:
        """The one that ran the model."""
        return self.units.get(self.model.unit) or UnitProfile()

    @property
    def usable(self) -> bool:
        """Whether the scheduler could learn a cost curve from it."""
        return len(self.unit.forward_ms) > 1 and 1 in self.unit.forward_ms

    def device(self) -> DeviceProfile:
        """What `edgespec.load(profile=…)` takes."""
        return DeviceProfile(
            chip=self.machine.processor,
            os=self.machine.system,
            memory_bytes=self.machine.memory_bytes,
            units=self.units,
            overlap_penalty=self.overlap_penalty,
            provenance=f"measured on {self.date[:10]} with {self.model.name} on {self.model.engine}",
        )

    def pass_ms(self, rows: int, context: float) -> float | None:
        """One forward pass of the model: linear between measured widths and contexts, the nearest context beyond them."""
        table = self.unit.forward_ms
        if 1 not in table:
            return None
        by_rows = {m: at_context(by_context, context) for m, by_context in table.items() if by_context}
        return by_rows[1] * measured_cost(by_rows)(rows)

    def round_ms(self, rows: int, context: float, drafted: int) -> float | None:
        """A whole round, drafting and everything around it included."""
        target_ms = self.pass_ms(rows, context)
        if target_ms is None:
            return None
        draft_ms = (self.draft.ms_per_token or 0.0) * drafted if drafted else self.draft.miss_ms or 0.0
        return target_ms + draft_ms + (self.other_ms or 0.0)


def at_context(ms: Mapping[int, float], context: float) -> float:
    """ms at this context, linear between the measured ones."""
    known = sorted(ms)
    below = max((c for c in known if c <= context), default=known[0])
    above = min((c for c in known if c >= context), default=known[-1])
    if below == above:
        return ms[below]
    return ms[below] + (ms[above] - ms[below]) * (context - below) / (above - below)


# --- on disk ---------------------------------------------------------------------------------------------------------


def to_table(value: Any) -> Any:
    """Plain dicts, lists and scalars; None is left out, because TOML has none."""
    if is_dataclass(value):
        return {f.name: to_table(v) for f in fields(value) if (v := getattr(value, f.name)) is not None}
    if isinstance(value, Mapping):
        return {str(key): to_table(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [to_table(item) for item in cast("tuple[Any, ...]", value)]
    return round(value, 6) if isinstance(value, float) else value


def to_toml(measured: Measured) -> str:
    return "\n".join(_lines(to_table(measured), ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Scalars first, then a section for each table below."""
    lines = [f"{_key(k)} = {_scalar(v)}" for k, v in table.items() if not isinstance(v, dict)]
    if path and (lines or not table):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for key, below in table.items():
        if isinstance(below, dict):
            lines += _lines(cast("dict[str, Any]", below), (*path, key))
    return lines


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        items = [_scalar(item) for item in cast("list[Any]", value)]
        return f"[{', '.join(items)}]" if not any(item.startswith("{") for item in items) else "[\n  " + ",\n  ".join(items) + ",\n]"
    if isinstance(value, dict):  # only inside lists
        return "{ " + ", ".join(f"{_key(k)} = {_scalar(v)}" for k, v in cast("dict[str, Any]", value).items()) + " }"
    return repr(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse(text: str, *, origin: str) -> Measured:
    """A measured profile from TOML. ArtifactError names the file, the place in it, what was found and what was expected."""
    table = toml_text.read(text, origin=origin)
    if table.get("schema") != SCHEMA:
        raise ArtifactError(f"{origin}: schema is {table.get('schema')!r}, this version reads {SCHEMA!r}")
    measured = cast(Measured, _decode(Measured, table, origin))
    _check(measured, origin)
    return measured


def _check(measured: Measured, origin: str) -> None:
    for name, unit in measured.units.items():
        for table in (unit.forward_ms, unit.forward_p95_ms):
            if any(rows < 1 or not by_context for rows, by_context in table.items()):
                raise ArtifactError(f"{origin}: unit {name} needs rows >= 1, each with times, got {table}")
            if any(ms <= 0 for by_context in table.values() for ms in by_context.values()):
                raise ArtifactError(f"{origin}: unit {name} needs rows >= 1 and times > 0, got {table}")
    for name, kind in measured.kinds.items():
        if not len(kind.offered) >= len(kind.tested) == len(kind.kept):
            raise ArtifactError(f"{origin}: kind {name} has {len(kind.tested)} tested and {len(kind.kept)} kept positions")


def _decode(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _decode(arguments[0], value, where)  # X | None: what is there is an X
    if is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, value, where)
    if origin is tuple:
        items = _expect(value, list, where)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is Mapping:
        return {
            _decode_key(arguments[0], key, where): _decode(arguments[1], item, f"{where}.{key}")
            for key, item in _expect(value, dict, where).items()
        }
    if hint is float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not abs(number) <= sys.float_info.max:  # NaN, infinite, or a whole number too large
            raise ArtifactError(f"{where} is {value!r}, expected a number")
        return float(number)
    return _expect(value, hint, where)


def _decode_dataclass(hint: type[Any], value: Any, where: str) -> Any:
    table = _expect(value, dict, where)
    known = {f.name: f for f in fields(hint)}
    missing = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING and name not in table]
    unknown = sorted(table.keys() - known.keys())
    if missing or unknown:
        raise ArtifactError(f"{where}: unknown entries {unknown}, missing entries {missing}")
    hints = get_type_hints(hint)
    values = {name: _decode(hints[name], item, f"{where}: {name}") for name, item in table.items()}
    try:
        return hint(**values)
    except ValueError as error:
        raise ArtifactError(f"{where}: {error}") from error


def _decode_key(hint: Any, key: str, where: str) -> Any:
    if hint is not int:
        return key
    if not (key.isascii() and key.isdigit()):
        raise ArtifactError(f"{where} has the entry {key!r}, expected whole numbers")
    return int(key)


def _expect(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ArtifactError(f"{where} is {value!r}, expected {kind.__name__}")
    return value
