"""Recipes: which tensor gets which format, and what the parity gate demands. A recipe is a small toml file.

name = "mixed"
[default]
bits = 4
block = 32
symmetric = false
[[rules]]                                # the first rule whose pattern matches wins
tensors = "model.layers.*.mlp.down_proj.weight"
bits = 8
block = 32
[gate]
argmax_agreement = 0.6                   # at least
kl = 0.5                                 # at most, nats
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from edgespec.core.errors import ArtifactError
from edgespec.core.manifest import check_name

_T = TypeVar("_T")

BLOCKS = (16, 32, 64, 128, 256)
_FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True)
class Format:
    """`bits` 4 or 8: integers in blocks of `block` columns, `symmetric` without zero points; 16 or 32: floats."""

    bits: int
    block: int = 0
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise ArtifactError(f"a format has 4, 8, 16 or 32 bits, got {self.bits}")
        if self.quantized and self.block not in BLOCKS:
            raise ArtifactError(f"a {self.bits}-bit format needs a block of {', '.join(map(str, BLOCKS))}, got {self.block}")
        if not self.quantized and self.block:
            raise ArtifactError(f"a {self.bits}-bit format is a float and has no block, got {self.block}")

    @property
    def quantized(self) -> bool:
        return self.bits < 16

    def __str__(self) -> str:
        return f"int{self.bits} block {self.block}" if self.quantized else f"float{self.bits}"


FLOAT = Format(32)


@dataclass(frozen=True, slots=True)
class Rule:
    """`tensors` is a shell pattern over tensor names."""

    tensors: str
    format: Format


@dataclass(frozen=True, slots=True)
class Gate:
    """What a converted model must reach against its float32 reference; `kl` in nats, mean over positions."""

    argmax_agreement: float = 0.0
    kl: float = float("inf")


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    default: Format
    rules: tuple[Rule, ...] = ()
    gate: Gate = field(default_factory=Gate)

    def format_for(self, name: str, shape: tuple[int, ...]) -> Format:
        """The format this recipe asks for; vectors (norms, biases) always stay float32. See `fit` for what is possible."""
        if len(shape) != 2:
            return FLOAT
        return next((rule.format for rule in self.rules if fnmatchcase(name, rule.tensors)), self.default)


def fit(format: Format, columns: int, *, blocks: Sequence[int] = BLOCKS) -> tuple[Format, str | None]:
    """The nearest possible format for a weight of `columns` on an engine that knows `blocks`, and the reason if it differs.

    The largest smaller block that divides the columns, else float32. The reason belongs into `Artifact.exceptions`.
    """
    if not format.quantized or (format.block in blocks and columns % format.block == 0):
        return format, None
    why = f"block {format.block} does not divide {columns} columns" if columns % format.block else f"no block {format.block} on this engine"
    smaller = [b for b in blocks if b < format.block and columns % b == 0]
    fitted = Format(format.bits, max(smaller), format.symmetric) if smaller else FLOAT
    return fitted, f"{fitted} ({why})"


def recipe_names() -> list[str]:
    """The recipes that come with edgespec."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by name, or from a file ending in .toml. ArtifactError says what is wrong with it, or which names there are."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in recipe_names():
            raise ArtifactError(f"no recipe {str(name_or_path)!r}; there are {', '.join(recipe_names())}, or name a .toml file")
        path = _FOLDER / f"{name_or_path}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArtifactError(f"cannot read recipe {path}: {error}") from error
    try:
        return _recipe(data)
    except ArtifactError as error:
        raise ArtifactError(f"recipe {path}: {error}") from error


def _recipe(data: Mapping[str, Any]) -> Recipe:
    _known(data, {"name", "default", "rules", "gate"}, "the recipe")
    rules = _typed(data.get("rules", []), list, "rules")
    gate = _typed(data.get("gate", {}), dict, "gate")
    _known(gate, {f.name for f in fields(Gate)}, "gate")
    name = _typed(data.get("name"), str, "name")
    check_name(name)  # it becomes part of a folder's name
    return Recipe(
        name=name,
        default=_format(_typed(data.get("default"), dict, "default"), "default"),
        rules=tuple(_rule(_typed(rule, dict, f"rules[{i}]"), f"rules[{i}]") for i, rule in enumerate(rules)),
        gate=Gate(**{key: _number(value, f"gate.{key}") for key, value in gate.items()}),
    )


def _rule(data: Mapping[str, Any], where: str) -> Rule:
    rest = dict(data)
    return Rule(_typed(rest.pop("tensors", None), str, f"{where}.tensors"), _format(rest, where))


def _format(data: Mapping[str, Any], where: str) -> Format:
    _known(data, {f.name for f in fields(Format)}, where)
    return Format(
        _typed(data.get("bits"), int, f"{where}.bits"),
        _typed(data.get("block", 0), int, f"{where}.block"),
        _typed(data.get("symmetric", True), bool, f"{where}.symmetric"),
    )


def _known(data: Mapping[str, Any], keys: set[str], where: str) -> None:
    if unknown := sorted(set(data) - keys):
        raise ArtifactError(f"unknown keys {unknown} in {where}; known: {', '.join(sorted(keys))}")


def _typed(value: Any, kind: type[_T], where: str) -> _T:
    if type(value) is not kind:
        raise ArtifactError(f"{where} must be of type {kind.__name__}, got {value!r}")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise ArtifactError(f"{where} must be a number, got {value!r}")
    return float(value)
