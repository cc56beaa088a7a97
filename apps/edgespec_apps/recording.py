"""What drafters would have guessed along real answers: one JSON line that says whence, then one per answer.

Every position of an answer is recorded, so that rounds of any length can be replayed exactly. A position p is the moment at which p
tokens of the answer are known. Columns are strings with one digit per position, base 17 where they count tokens (0 … 9, a … g):

    right       how many of its next guesses, at most 16, would be the answer's own tokens
    offered     how many it would guess if asked for 16; null: always as many as asked for
    confidence  level of its offer; null: it depends on the rounds (a draft model's, see `drafting/model.py`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from edgespec.core.drafter import Offer, Trial
from edgespec.core.errors import ArtifactError
from edgespec.drafting.ngram import EXPECTED, NgramDrafter
from edgespec_device_profiles.history import write_whole

SCHEMA = "edgespec.recording/1"
LONGEST = 16  # guesses recorded per position
DIGITS = "0123456789abcdefg"
LEVELS = DIGITS[:10]
PRIORS: Mapping[str, Sequence[float]] = {NgramDrafter.name: EXPECTED}  # by level: what drafters say of themselves, not of a text
BUNDLED = "recording-qwen2.5-coder-1.5b.jsonl"
AGAIN = "record it again with `edgespec bench --record FILE`"


class Step(NamedTuple):
    """A round: nodes drafted, nodes kept, and the position after it."""

    drafted: int
    kept: int
    position: int


@dataclass(frozen=True, slots=True)
class Track:
    """One drafter along one answer of n tokens: the columns, as in the module's text, each [n]."""

    right: Sequence[int]
    offered: Sequence[int] | None = None
    confidence: Sequence[int] | None = None

    def offer(self, name: str, position: int, most: int) -> Offer:
        """The offer at this position if `most` nodes are allowed."""
        level = self.confidence[position] if self.confidence is not None else 0
        priors = PRIORS.get(name, ())
        tokens = None if self.offered is None else min(most, self.offered[position])
        return Offer(name, tokens, level, priors[level] if 0 < level < len(priors) else None)

    def trial(self, offer: Offer, position: int, emitted: int) -> Trial | None:
        """What became of the offer at this position when so many tokens came out; None of a draft model, which must be asked."""
        tested = min(offer.tokens or 0, emitted)
        if self.confidence is None or not tested:
            return None
        return Trial(offer.drafter, offer.confidence, tested, min(self.right[position], tested))


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """`tokens`: of the answer, its end token included if it has one. `tracks` by drafter."""

    kind: str
    prompt_tokens: int
    tokens: int
    tracks: Mapping[str, Track]

    def step(self, drafter: str, position: int, most: int) -> Step:
        """A round at `position` that drafts `most` nodes, fewer where the drafter offers no more. Greedy, so kept means equal."""
        track = self.tracks[drafter]
        drafted = most if track.offered is None else min(most, track.offered[position])
        kept = min(drafted, track.right[position], self.tokens - position - 1)
        return Step(drafted, kept, position + kept + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Answers of one model, greedy, at most `max_tokens` long. `drafts`: what stands behind each drafter, by its name."""

    model: str
    recipe: str
    drafts: Mapping[str, str]
    max_tokens: int
    date: str
    version: str  # of the program that recorded it
    command: str  # that records the like
    answers: Sequence[RecordedAnswer]


def bundled() -> Recording:
    """The one that comes with the program."""
    return parse((files("edgespec_apps") / "data" / BUNDLED).read_text(encoding="utf-8"), origin=BUNDLED)


def load(file: Path) -> Recording:
    """ArtifactError says what is wrong with it."""
    try:
        return parse(file.read_text(encoding="utf-8"), origin=str(file))
    except OSError as error:
        raise ArtifactError(f"cannot read the recording {file}: {error.strerror}; {AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{file} is no recording: it is not UTF-8 text; {AGAIN}") from error


def save(recording: Recording, file: Path) -> None:
    """All of it or nothing."""
    write_whole(file, to_lines(recording))


def to_lines(recording: Recording) -> str:
    head = {
        "schema": SCHEMA,
        "model": recording.model,
        "recipe": recording.recipe,
        "drafts": dict(recording.drafts),
        "max_tokens": recording.max_tokens,
        "date": recording.date,
        "version": recording.version,
        "command": recording.command,
    }
    rows: list[dict[str, Any]] = [head]
    for answer in recording.answers:
        tracks = {
            name: {"right": _digits(track.right), "offered": _digits(track.offered), "confidence": _digits(track.confidence)}
            for name, track in answer.tracks.items()
        }
        rows.append({"kind": answer.kind, "prompt_tokens": answer.prompt_tokens, "tokens": answer.tokens, "tracks": tracks})
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def parse(text: str, *, origin: str) -> Recording:
    """What `to_lines` wrote. ArtifactError names the line."""
    rows = [_Row(line, f"{origin}, line {number}") for number, line in enumerate(text.splitlines(), 1)]
    if not rows:
        raise ArtifactError(f"{origin} is empty, not a recording; {AGAIN}")
    head = rows[0]
    if head.get("schema", str) != SCHEMA:
        head.refuse(f"schema {head.get('schema', str)!r} where this version reads {SCHEMA!r}")
    drafts = head.get("drafts", dict)
    if not drafts or not all(isinstance(model, str) for model in drafts.values()):
        head.refuse(f"drafts must name a model for each drafter, found {drafts!r}")
    max_tokens = head.count("max_tokens", 1, 1 << 24)
    if len(rows) < 2:
        head.refuse("no answer follows")
    return Recording(
        model=head.get("model", str),
        recipe=head.get("recipe", str),
        drafts=drafts,
        max_tokens=max_tokens,
        date=head.get("date", str),
        version=head.get("version", str),
        command=head.get("command", str),
        answers=[_answer(row, list(drafts), max_tokens) for row in rows[1:]],
    )


def _answer(row: _Row, drafters: Sequence[str], max_tokens: int) -> RecordedAnswer:
    tokens = row.count("tokens", 1, max_tokens)
    tracks = row.get("tracks", dict)
    if sorted(tracks) != sorted(drafters):
        row.refuse(f"tracks of {sorted(tracks)} where the first line names {sorted(drafters)}")
    prompt_tokens = row.count("prompt_tokens", 1, 1 << 24)
    return RecordedAnswer(row.get("kind", str), prompt_tokens, tokens, {name: _track(row, name, tracks[name], tokens) for name in tracks})


def _track(row: _Row, name: str, columns: Any, tokens: int) -> Track:
    if not isinstance(columns, dict) or set(columns) != {"right", "offered", "confidence"}:
        row.refuse(f"the track of {name!r} must have right, offered and confidence")

    def column(key: str, digits: str) -> list[int] | None:
        text: Any = columns[key]
        if text is None and key != "right":
            return None
        wanted = f"{key} of {name!r} needs {tokens} digits from {digits}"
        if not isinstance(text, str):
            row.refuse(f"{wanted}, found {text!r:.60}")
        if len(text) != tokens:
            row.refuse(f"{wanted}, found {len(text)}")
        if strange := sorted(set(text) - set(digits)):
            row.refuse(f"{wanted}, found {strange[0]!r}")
        return [digits.index(digit) for digit in text]

    right = column("right", DIGITS)
    assert right is not None
    for position, n in enumerate(right):
        if n > tokens - position:
            row.refuse(f"{name!r} is right about {n} tokens where {tokens - position} are left")
    return Track(right, column("offered", DIGITS), column("confidence", LEVELS))


def _digits(values: Sequence[int] | None) -> str | None:
    return None if values is None else "".join(DIGITS[value] for value in values)


class _Row:
    """One line; every complaint says which."""

    def __init__(self, line: str, where: str) -> None:
        self._where = where
        try:
            self._values: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{where}: no JSON ({error}); {AGAIN}") from error
        if not isinstance(self._values, dict):
            self.refuse(f"an object was expected, found {type(self._values).__name__}")

    def refuse(self, complaint: str) -> NoReturn:
        raise ArtifactError(f"{self._where}: {complaint}; {AGAIN}")

    def get(self, key: str, kind: type[Any]) -> Any:
        value: Any = self._values.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.refuse(f"{key} must be {kind.__name__}, found {value!r:.60}")
        return value

    def count(self, key: str, low: int, high: int) -> int:
        value: int = self.get(key, int)
        if not low <= value <= high:
            self.refuse(f"{key} must lie in {low}..{high}, found {value}")
        return value
