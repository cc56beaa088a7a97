"""The whole contract between converters and runtime: what a model package (a folder) holds.

my-model/
  manifest.json
  tokenizer.json | tokenizer.model      chat_template.jinja
  onnx-int8/ …                          one folder per artifact: an engine's files for one recipe
  mlx-int8/ …
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import PurePosixPath
from types import NoneType, UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from edgespec.core.decoder import DecoderConfig
from edgespec.core.engine import ModelSpec
from edgespec.core.errors import ArtifactError

SCHEMA = "edgespec.package/1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """`file` is a Hugging Face `tokenizers` JSON or a sentencepiece model, beside the manifest.

    `stop_ids` end an answer: every end-of-text and end-of-turn id of the model, its generation config and its template.
    `chat_template` names a Jinja file beside the manifest, or is None for base models.
    """

    kind: Literal["tokenizers", "sentencepiece"]
    file: str
    add_bos: bool
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What the conversion gate measured against the reference on `n` positions. `kl` in nats, mean; `max_error` on logits."""

    argmax_agreement: float
    kl: float
    max_error: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One engine's files. `folder` and `files` are relative to the package; `weight_bytes` are read per decoded token.

    `exceptions`: layers that did not get the recipe's format, with what they got instead and why.
    `options`: whatever the engine's own loader needs, written by its converter.
    """

    engine: str
    recipe: str
    folder: str
    files: Mapping[str, FileRecord]
    weight_bytes: int
    bits_per_weight: float
    width_invariant: bool = False
    parity: Parity | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict[str, str])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`vocab_size` counts real ids, `vocab_digest` is sha256 over id → bytes. `draft` names the package that drafts for this one."""

    name: str
    decoder: DecoderConfig
    vocab_size: int
    vocab_digest: str
    tokenizer: TokenizerSpec
    files: Mapping[str, FileRecord]  # tokenizer and template
    artifacts: tuple[Artifact, ...] = ()
    draft: str | None = None
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
    license: str = ""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ArtifactError(f"package {self.name!r} has schema {self.schema!r}, this edgespec reads {SCHEMA!r}")
        check_name(self.name)
        if self.draft is not None:
            check_name(self.draft)
        if not 0 < self.vocab_size <= self.decoder.vocab_rows:
            raise ArtifactError(f"package {self.name!r}: {self.vocab_size} tokens but {self.decoder.vocab_rows} embedding rows")
        paths = [self.tokenizer.file, *self.files]
        if self.tokenizer.chat_template:
            paths.append(self.tokenizer.chat_template)
        for artifact in self.artifacts:
            paths += [artifact.folder, *artifact.files]
        for path in paths:
            check_relative(path)
        bad = [i for i in (*self.tokenizer.stop_ids, self.tokenizer.bos_id or 0) if not 0 <= i < self.vocab_size]
        if bad:
            raise ArtifactError(f"package {self.name!r}: special ids {bad} lie outside its {self.vocab_size} tokens")

    def find(self, engine: str, recipe: str | None = None) -> Artifact | None:
        """The first artifact of this engine (and recipe)."""
        return next((a for a in self.artifacts if a.engine == engine and recipe in (None, a.recipe)), None)

    def spec(self, artifact: Artifact | None = None, *, kv_bytes_per_value: int = 4) -> ModelSpec:
        """What the package says of its model, before or after an engine has loaded `artifact`."""
        return ModelSpec(
            name=self.name,
            vocab_size=self.vocab_size,
            vocab_digest=self.vocab_digest,
            max_context=self.decoder.max_context,
            layers=self.decoder.layers,
            hidden=self.decoder.hidden,
            weight_bytes=artifact.weight_bytes if artifact else 0,
            kv_bytes_per_token=self.decoder.kv_bytes_per_token(kv_bytes_per_value),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "manifest.json") -> Self:
        """Raises ArtifactError naming `where` for anything that is not a whole manifest."""
        try:
            data = json.loads(text)
            data["decoder"] = DecoderConfig.from_json(data["decoder"])
            spec: dict[str, Any] = dict(data["tokenizer"])
            spec["stop_ids"] = tuple(spec["stop_ids"])
            data["tokenizer"] = TokenizerSpec(**spec)
            data["files"] = _records(data["files"])
            data["artifacts"] = tuple(_artifact(a) for a in data["artifacts"])
            manifest = cls(**data)
            _check_types(manifest)
            return manifest
        except ArtifactError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ArtifactError(f"{where} is not a whole package manifest ({type(error).__name__}: {error})") from error


def check_name(name: str) -> None:
    """Raise ArtifactError unless `name` can name a package folder on every system."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise ArtifactError(f"{name!r} is no package name; use letters, digits and . _ + - (at most 128, first a letter or digit)")


def check_relative(path: str) -> None:
    """Raise ArtifactError for a path that could leave the package folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise ArtifactError(f"path {path!r} leaves the package folder; refusing to read it")


def _records(data: Mapping[str, Any]) -> dict[str, FileRecord]:
    return {path: FileRecord(**record) for path, record in data.items()}


def _artifact(data: Mapping[str, Any]) -> Artifact:
    values: dict[str, Any] = dict(data)
    values["files"] = _records(data["files"])
    values["parity"] = Parity(**data["parity"]) if data.get("parity") else None
    return Artifact(**values)


def _check_types(record: Any) -> None:
    """Raise TypeError for a field of a dataclass, or of one inside it, whose value is not of the declared type."""
    hints = get_type_hints(type(record))
    for each in fields(record):
        value = getattr(record, each.name)
        if not _fits(value, hints[each.name]):
            raise TypeError(f"{each.name} should be {each.type}, found {value!r:.60}")


def _fits(value: Any, hint: Any) -> bool:
    kind, parameters = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is UnionType:
        return any(_fits(value, choice) for choice in parameters)
    if kind is Literal:
        return value in parameters
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, parameters[0]) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(item, parameters[1]) for item in value.values())  # pyright: ignore[reportUnknownVariableType]
    if is_dataclass(hint):
        if isinstance(value, hint):  # pyright: ignore[reportArgumentType]
            _check_types(value)
            return True
        return False
    if hint is float:
        return type(value) in (int, float)
    return type(value) is (NoneType if hint is None else hint)  # bool is no int here
