"""Interleaved timing of several ways to answer the same prompts, and what the samples say."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import zip_longest
from statistics import median

KINDS = ("code-edit", "chat", "json", "summary")
DRIFT_LIMIT = 0.15  # change of plain speed between the first and the last third that spoils a measurement


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed answer. `tok_s` counts from the first token on; 0 when the answer was too short to tell."""

    token_ids: tuple[int, ...]
    tok_s: float
    ttft_s: float
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    overhead_ms: float = 0.0
    busy_ms: float = 0.0  # of the rounds and of turning tokens into text


Runner = Callable[[Sequence[int], int], Run]  # prompt ids, most tokens to answer with


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt answered once by every runner, one right after the other. `runs` in the order they ran."""

    prompt: Prompt
    repeat: int
    prompt_tokens: int
    runs: Mapping[str, Run]

    @property
    def identical(self) -> bool:
        return self.runs["plain"].token_ids == self.runs["spec"].token_ids


def load_prompts(kinds: Sequence[str], first: int | None = None) -> list[Prompt]:
    """The (first) bundled prompts of these kinds, kinds taking turns so that a slow spell hits them alike. Raises ValueError."""
    if unknown := sorted(set(kinds) - set(KINDS)) or not kinds:
        raise ValueError(f"--kinds needs some of {', '.join(KINDS)}, got {unknown or 'none'}")
    data = tomllib.loads((files("edgespec_apps") / "data" / "bench_prompts.toml").read_text(encoding="utf-8"))
    by_kind = [[Prompt(kind, item["name"], item["text"].strip()) for item in data[kind][:first]] for kind in kinds]
    return [prompt for turn in zip_longest(*by_kind) for prompt in turn if prompt]


def measure(
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    runners: Mapping[str, Runner],
    *,
    repeats: int,
    max_tokens: int,
    on_sample: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """Every prompt by every runner, `repeats` times over, in another order each time (`orders`)."""
    samples: list[Sample] = []
    turns = orders(list(runners))
    for repeat in range(repeats):
        for position, (prompt, ids) in enumerate(prompts):
            names = turns[(repeat + position) % len(turns)]
            samples.append(Sample(prompt, repeat, len(ids), {name: runners[name](ids, max_tokens) for name in names}))
            on_sample(len(samples), repeats * len(prompts))
    return samples


def orders(names: Sequence[str]) -> list[list[str]]:
    """Orders in which everyone stands equally often at every place and behind every other, the given order first.

    A run leaves caches and clock rates behind for the next one: whoever always followed the same runner would gain or lose by it
    (a Latin square balanced for carry-over; Williams 1949; of an odd number also mirrored).
    """
    n = len(names)
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) % n for k in range(n)]
    place = {mark: k for k, mark in enumerate(zigzag)}
    square = [[names[place[(mark + shift) % n]] for mark in zigzag] for shift in range(n)]
    return square if n % 2 == 0 else square + [row[::-1] for row in square]


def middle(values: Iterable[float]) -> float | None:
    known = [value for value in values if value > 0]
    return median(known) if known else None


def tok_s(samples: Iterable[Sample], runner: str) -> float | None:
    """Median over prompts of each prompt's median over repeats."""
    return middle(_per_prompt(samples, runner).values())


def ratio(samples: Iterable[Sample], over: str, under: Sequence[str]) -> float | None:
    """Median over prompts of how much faster `over` was than the fastest of `under` on the same prompt."""
    samples = list(samples)
    above = _per_prompt(samples, over)
    below = [_per_prompt(samples, name) for name in under]
    quotients: list[float] = []
    for prompt, speed in above.items():
        rivals = [b[prompt] for b in below if prompt in b]
        if rivals:
            quotients.append(speed / max(rivals))
    return middle(quotients)


def _per_prompt(samples: Iterable[Sample], runner: str) -> dict[Prompt, float]:
    speeds: dict[Prompt, list[float]] = {}
    for sample in samples:
        speeds.setdefault(sample.prompt, []).append(sample.runs[runner].tok_s)
    medians = {prompt: middle(values) for prompt, values in speeds.items()}
    return {prompt: value for prompt, value in medians.items() if value is not None}


def prefill_tok_s(samples: Iterable[Sample], runner: str) -> float | None:
    """Prompt tokens per second until the first token of the answer."""
    return middle(s.prompt_tokens / s.runs[runner].ttft_s for s in samples if s.runs[runner].ttft_s > 0)


def mean_context(samples: Sequence[Sample]) -> float:
    """Tokens in the cache, averaged over an answer and over the samples."""
    return sum(s.prompt_tokens + len(s.runs["plain"].token_ids) / 2 for s in samples) / len(samples)


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative change of plain speed from the first to the last third of the run, each kind against its own median."""

    change: float
    spoiled: bool = field(default=False)


def drift(samples: Sequence[Sample]) -> Drift | None:
    """None with fewer than six samples."""
    usual = {kind: tok_s([s for s in samples if s.prompt.kind == kind], "plain") for kind in {s.prompt.kind for s in samples}}
    relative = [s.runs["plain"].tok_s / u for s in samples if (u := usual[s.prompt.kind]) and s.runs["plain"].tok_s > 0]
    third = len(relative) // 3
    if third < 2:
        return None
    change = median(relative[-third:]) / median(relative[:third]) - 1
    return Drift(change, abs(change) > DRIFT_LIMIT)
