"""What a session streams, and what it returns when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgespec.core.trace import RoundTrace

Origin = Literal["drafted", "corrected", "bonus", "plain"]
Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """An emitted token's natural log-probability under the target's unfiltered law at temperature 1; `top`: the likeliest (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One round's worth of answer. `text` may lag behind `token_ids`: half characters and possible stop strings are held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    finish: Finish | None = None
    trace: RoundTrace | None = None
    logprobs: tuple[TokenLogProb, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts and times of one answer. `ttft_s` from the call to the first token; `tok_s` over the rounds after the prompt was read;
    `overhead_share` is the part of round time spent outside engine calls."""

    rounds: int
    drafted: int
    kept: int
    tokens: int
    ttft_s: float
    tok_s: float
    overhead_share: float
    host_bytes_copied: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`token_ids` include the stop id that ended the answer, `text` does not. `prompt_tokens` counts the whole prompt, cached or not."""

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    stats: Stats
    traces: tuple[RoundTrace, ...] = ()
    logprobs: tuple[TokenLogProb, ...] = ()
