"""Typed reading of settings that a model file carries: a missing or ill-typed value is an error that names file and key."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgespec.core.errors import ArtifactError

_MAX_FLOAT32 = 3.4e38


@contextmanager
def naming(where: str) -> Generator[None]:
    """Put the file's name before an ArtifactError that does not know it, such as one of `DecoderConfig`."""
    try:
        yield
    except ArtifactError as error:
        if where in str(error):
            raise
        raise ArtifactError(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class Settings:
    """`values` by key; null counts as missing. `prefix` is put before keys in `values` ("llama." in GGUF)."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one value per layer, all alike
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_FLOAT32:
            raise self.wrong(key, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not value > 0:
            raise self.wrong(key, "a positive number")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def section(self, key: str) -> Settings | None:
        """A nested object, or None when it is missing."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Settings(value, f"{self.where}: {key}")

    def layers(self, key: str, tensors: int) -> int:
        """A layer count, refused when the file has fewer tensors: what is built per layer must not grow with a mere claim."""
        value = self.integer(key)
        if value > tensors:
            raise ArtifactError(f"{self.where}: {self.prefix}{key} claims {value} layers, but there are only {tensors} tensors")
        return value

    def wrong(self, key: str, expected: str) -> ArtifactError:
        found = repr(self.get(key))
        return ArtifactError(f"{self.where}: {self.prefix}{key} must be {expected}, found {found[:80]}")

    def refuse(self, key: str, reason: str) -> ArtifactError:
        found = repr(self.get(key))
        return ArtifactError(f"{self.where}: {self.prefix}{key} = {found[:80]} is not supported: {reason}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ArtifactError(f"{self.where}: {self.prefix}{key} is missing")
        return value
