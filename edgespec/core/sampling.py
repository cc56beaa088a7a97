"""Sampling options, and `normalise`: the only place where logits become probabilities, for target and drafter alike.

Order: repetition, presence and frequency penalties, then bias, then temperature, then top-k, top-p and min-p. Penalties count
every token of the context once: prompt, accepted output, and the draft nodes above the row being judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import numpy as np

from edgespec.core.scores import Float32, Float64

_PARTIAL = 1024  # candidates sorted before top-p falls back to sorting the whole vocabulary
_EXTREME = 1e6  # beyond this, or its inverse, options would carry logits out of float32
_LARGEST_BIAS = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1, the other penalties 0 mean off.

    `bias` adds to the logit of a token id. `seed` None draws one. `logprobs` None reports none, n reports the chosen token's
    log-probability under the target's unfiltered law at temperature 1, with the n most likely alternatives.
    Raises ValueError for values that make no sense.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{f.name} must be a finite number, got {value}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.temperature and not 1 / _EXTREME <= self.temperature <= _EXTREME:
            raise ValueError(f"temperature must be 0 or lie in {1 / _EXTREME:g}..{_EXTREME:g}, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0: off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be > 0 (1: off), got {self.repetition_penalty}")
        if not 1 / _EXTREME <= self.repetition_penalty <= _EXTREME:
            raise ValueError(f"repetition_penalty must lie in {1 / _EXTREME:g}..{_EXTREME:g}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(getattr(self, name)) > _EXTREME:
                raise ValueError(f"{name} must lie in {-_EXTREME:g}..{_EXTREME:g}, got {getattr(self, name)}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs must lie in 0..20, got {self.logprobs}")
        for token, value in self.bias.items():
            if token < 0 or not (abs(value) <= _LARGEST_BIAS or value == -math.inf):
                raise ValueError(f"bias needs token ids >= 0, and values that are -inf or at most {_LARGEST_BIAS:g}, got {token}: {value}")
        object.__setattr__(self, "bias", MappingProxyType(dict(self.bias)))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits change before temperature, so that the device's own argmax is not the answer."""
        return self.penalised or bool(self.bias)


def adjust(logits: Float32, sampling: Sampling, counts: Mapping[int, int]) -> Float32:
    """Penalties and bias on one row [V]; the row itself when there are none. (Repetition: Keskar et al. 2019, section 4.1.)"""
    if not sampling.adjusts:
        return logits
    x = np.array(logits, np.float32)
    if sampling.penalised and counts:
        ids = np.fromiter(counts.keys(), np.int64, len(counts))
        n = np.fromiter(counts.values(), np.float32, len(counts))
        seen = x[ids]
        seen = np.where(seen > 0, seen / np.float32(sampling.repetition_penalty), seen * np.float32(sampling.repetition_penalty))
        x[ids] = seen - np.float32(sampling.presence_penalty) - n * np.float32(sampling.frequency_penalty)
    for token, value in sampling.bias.items():
        if token < len(x):
            x[token] += np.float32(value)
    return x


def log_softmax(logits: Float32) -> Float32:
    """Logits [V] to log-probabilities [V]."""
    x = logits - logits.max()
    return (x - np.float32(np.log(np.exp(x, dtype=np.float32).sum(dtype=np.float64)))).astype(np.float32)


def normalise(logits: Float32, sampling: Sampling, counts: Mapping[int, int] = MappingProxyType({})) -> Float32:
    """One row of logits [V] to log-probabilities float32 [V]; refused tokens get -inf. At temperature 0: a point mass."""
    x = adjust(logits, sampling, counts)
    if sampling.greedy:
        law = np.full(len(x), -np.inf, np.float32)
        law[int(x.argmax())] = 0.0
        return law
    x = x / np.float32(sampling.temperature)
    keep = _survivors(x, sampling)
    if keep is None:
        return log_softmax(x)
    law = np.full(len(x), -np.inf, np.float32)
    law[keep] = log_softmax(x[keep])
    return law


def _survivors(x: Float32, sampling: Sampling) -> np.ndarray | None:
    """Ids that top-k, top-p and min-p leave, in this order; None when all do. Ties go to lower ids."""
    ids: np.ndarray | None = None
    if 0 < sampling.top_k < len(x):
        ids = _largest(x, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(x, ids, sampling.top_p)
    if sampling.min_p > 0:
        floor = x.max() + np.float32(math.log(sampling.min_p))
        ids = np.flatnonzero(x >= floor) if ids is None else ids[x[ids] >= floor]
    return ids


def _largest(x: Float32, k: int) -> np.ndarray:
    """Ids of the k largest values, largest first; of equal values the lower id."""
    kth = np.partition(x, len(x) - k)[len(x) - k]
    above = np.flatnonzero(x > kth)
    ids = np.concatenate([above, np.flatnonzero(x == kth)[: k - len(above)]])
    return ids[np.lexsort((ids, -x[ids]))]


def _nucleus(x: Float32, ids: np.ndarray | None, top_p: float) -> np.ndarray:
    """The shortest most-likely-first run of ids whose probability reaches `top_p` (Holtzman et al. 2020, section 3.1)."""
    if ids is None:
        top = x.max()
        total = float(np.exp(x - top, dtype=np.float32).sum(dtype=np.float64))
        ids = _largest(x, min(_PARTIAL, len(x)))
        mass = np.exp((x[ids] - top).astype(np.float64)) / total
        if len(ids) < len(x) and mass.sum() < top_p:
            ids = np.argsort(-x, kind="stable")
            mass = np.exp((x[ids] - top).astype(np.float64)) / total
    else:
        mass = np.exp((x[ids] - x[ids].max()).astype(np.float64))
        mass /= mass.sum()
    return ids[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]


def draw(probabilities: Float64, rng: np.random.Generator) -> int:
    """One id from weights [V] (their sum need not be 1); never an id of weight 0."""
    cumulative = np.cumsum(probabilities)
    i = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return min(i, int(np.flatnonzero(probabilities)[-1])) if i >= len(cumulative) else i


@dataclass(slots=True)
class SamplingState:
    """Options plus the tokens they look back on. The loop owns one for the target; a drafter keeps its own."""

    sampling: Sampling
    counts: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def after(cls, sampling: Sampling, token_ids: Iterable[int]) -> SamplingState:
        state = cls(sampling)
        state.extend(token_ids)
        return state

    def extend(self, token_ids: Iterable[int]) -> None:
        """Count newly committed tokens, each once."""
        if self.sampling.penalised:
            for token in token_ids:
                self.counts[token] = self.counts.get(token, 0) + 1

    def _counts(self, path: Sequence[int]) -> Mapping[int, int]:
        if not path or not self.sampling.penalised:
            return self.counts
        counts = dict(self.counts)
        for token in path:
            counts[token] = counts.get(token, 0) + 1
        return counts

    def law(self, logits: Float32, path: Sequence[int] = ()) -> Float32:
        """Log-probabilities [V] of the token after the context and the draft tokens `path`."""
        return normalise(logits, self.sampling, self._counts(path))

    def best(self, logits: Float32, path: Sequence[int] = ()) -> int:
        """The most likely id after penalties and bias; of equals the lowest."""
        return int(adjust(logits, self.sampling, self._counts(path)).argmax())
