"""What simulated rounds meet: a text with one acceptance all through, or recorded answers one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from edgespec.core.drafter import Offer, Trial
from edgespec.core.errors import ArtifactError
from edgespec.drafting.model import Streak
from edgespec_apps.recording import LONGEST, RecordedAnswer, Recording

CONTEXT = 1024  # of a constant text, at every position
ENDLESS = 1 << 20  # room in it


class Reader(Protocol):
    """A text as one policy's rounds go through it."""

    @property
    def position(self) -> int:
        """Tokens of the present answer that are known."""
        ...

    @property
    def context_len(self) -> int:
        """Tokens that are known, those of the prompt included."""
        ...

    @property
    def room(self) -> int:
        """Most nodes that could still be delivered in this answer."""
        ...

    def offers(self, most: int) -> tuple[Offer, ...]:
        """One from every drafter, for at most so many nodes."""
        ...

    def step(self, drafter: str, most: int) -> tuple[int, int]:
        """A round in which this drafter may draft `most` nodes: (drafted, kept). The text moves on past it."""
        ...

    def trials(self) -> tuple[Trial, ...]:
        """What became of the last offers in the last step, of the drafters that would know."""
        ...


class Text(Protocol):
    """The same for every policy. `drafters`: the first is the one that plans mean when they name none."""

    @property
    def drafters(self) -> tuple[str, ...]: ...
    @property
    def title(self) -> str: ...
    @property
    def note(self) -> str:
        """A sentence or two on what it can and cannot show."""
        ...

    def reader(self) -> Reader: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One endless answer, one drafter, each of whose guesses is right with the chance `alpha`."""

    alpha: float
    seed: int = 0
    drafters: tuple[str, ...] = ("draft",)
    note = "Acceptance is the same at every position, the hardest text for a policy that adapts."

    @property
    def title(self) -> str:
        return f"acceptance {self.alpha:g}"

    def reader(self) -> Reader:
        return _ConstantReader(self)


class _ConstantReader:
    """Whether the drafter guesses right is drawn once per position of the text, so that every policy reads the same one."""

    context_len, room = CONTEXT, ENDLESS

    def __init__(self, text: Constant) -> None:
        self._alpha, self._rng = text.alpha, np.random.default_rng(text.seed)
        self._offers = tuple(Offer(name) for name in text.drafters)
        self._right: list[bool] = []
        self.position = 0

    def offers(self, most: int) -> tuple[Offer, ...]:
        return self._offers

    def step(self, drafter: str, most: int) -> tuple[int, int]:
        while len(self._right) < self.position + most:
            self._right += (self._rng.random(4096) < self._alpha).tolist()
        kept = 0
        while kept < most and self._right[self.position + kept]:
            kept += 1
        self.position += kept + 1
        return most, kept

    def trials(self) -> tuple[Trial, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded answers in an order drawn by `seed`: kinds take turns, each kind's answers are shuffled anew when all were given."""

    recording: Recording
    drafters: tuple[str, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if missing := [name for name in self.drafters if name not in self.recording.drafts]:
            raise ArtifactError(
                f"the recording of {self.recording.model} has no drafter {missing[0]!r}, only {', '.join(self.recording.drafts)};"
                " choose another --draft, or record again with `edgespec bench --draft MODEL --record FILE`"
            )

    @property
    def title(self) -> str:
        return f"text recorded from {self.recording.model}"

    @property
    def note(self) -> str:
        made = self.recording
        behind = ", ".join(dict.fromkeys(made.drafts[name] for name in self.drafters))
        return (
            f"Text: {len(made.answers)} greedy answers of {made.model} {made.recipe} with guesses by {behind}, recorded {made.date}."
            " What was accepted there is accepted here, whatever sizes are simulated."
            " Only decoding is simulated: prompts are taken as read."
        )

    def reader(self) -> Reader:
        return _RecordedReader(self)


class _RecordedReader:
    def __init__(self, text: Recorded) -> None:
        self._drafters, self._max_tokens = text.drafters, text.recording.max_tokens
        self._answers = _in_turns(text.recording, text.seed)
        self._answer = next(self._answers)
        self.position = 0
        self._streaks = self._fresh()
        self._offers: tuple[Offer, ...] = ()
        self._trials: tuple[Trial, ...] = ()

    def _fresh(self) -> dict[str, Streak]:
        """Of the drafters whose confidence depends on the rounds."""
        return {name: Streak() for name in self._drafters if self._answer.tracks[name].confidence is None}

    @property
    def context_len(self) -> int:
        return self._answer.prompt_tokens + self.position

    @property
    def room(self) -> int:
        return self._max_tokens - self.position - 1

    def offers(self, most: int) -> tuple[Offer, ...]:
        most = min(most, LONGEST)
        self._offers = tuple(self._offer(name, most) for name in self._drafters)
        return self._offers

    def _offer(self, name: str, most: int) -> Offer:
        offer = self._answer.tracks[name].offer(name, self.position, most)
        if name not in self._streaks:
            return offer
        level = self._streaks[name].level
        return replace(offer, confidence=level, expected=Streak.EXPECTED[level])

    def step(self, drafter: str, most: int) -> tuple[int, int]:
        before = self.position
        drafted, kept, self.position = self._answer.step(drafter, before, min(most, LONGEST))
        trials = (self._answer.tracks[offer.drafter].trial(offer, before, self.position - before) for offer in self._offers)
        self._trials = tuple(trial for trial in trials if trial is not None)
        for name, streak in self._streaks.items():
            if name == drafter and drafted:
                streak.guessed(drafted, kept)
            else:
                streak.passed(kept + 1)
        if self.position == self._answer.tokens:
            self._answer, self.position = next(self._answers), 0
            self._streaks = self._fresh()
        return drafted, kept

    def trials(self) -> tuple[Trial, ...]:
        return self._trials


def _in_turns(recording: Recording, seed: int) -> Iterator[RecordedAnswer]:
    """Without end: one answer of every kind, the kinds in a new order each time."""
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[RecordedAnswer]] = {}
    for answer in recording.answers:
        by_kind.setdefault(answer.kind, []).append(answer)
    left: dict[str, list[int]] = {kind: [] for kind in by_kind}
    kinds = list(by_kind)
    while True:
        for i in rng.permutation(len(kinds)).tolist():
            kind = kinds[i]
            left[kind] = left[kind] or rng.permutation(len(by_kind[kind])).tolist()
            yield by_kind[kind][left[kind].pop()]
