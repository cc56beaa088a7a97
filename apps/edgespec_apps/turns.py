"""What one answer looked like while it streamed: the status line, and the colours of guessed text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgespec_apps.console import safe

if TYPE_CHECKING:
    from edgespec.core.chunk import Chunk

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(slots=True)
class Tally:
    """Counts over one or more answers. Speeds leave out the wait for each answer's first tokens."""

    clock: Callable[[], float] = time.perf_counter
    answers: int = 0
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    tokens: int = 0
    decoded: int = 0  # tokens after each answer's first chunk
    decode_s: float = 0.0
    first_s: float = 0.0  # waits for a first token, summed
    _asked: float = field(default=0.0, repr=False)
    _last: float | None = field(default=None, repr=False)

    def begin(self) -> None:
        self._asked, self._last = self.clock(), None
        self.answers += 1

    def add(self, chunk: Chunk) -> None:
        now, tokens = self.clock(), len(chunk.token_ids)
        if chunk.trace:
            self.rounds += 1
            self.drafted += chunk.trace.drafted
            self.kept += chunk.trace.kept
        self.tokens += tokens
        if self._last is not None:
            self.decoded += tokens
            self.decode_s += now - self._last
        elif tokens:
            self.first_s += now - self._asked
        if tokens or self._last is not None:
            self._last = now

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.clock,
            *(
                getattr(self, name) + getattr(other, name)
                for name in ("answers", "rounds", "drafted", "kept", "tokens", "decoded", "decode_s", "first_s")
            ),
        )

    def line(self) -> str:
        """For instance "38 tokens, 21.3 tok/s, first after 0.21 s, 1.80 of 4.00 guesses kept per round"."""
        parts = [f"{self.tokens} tokens"]
        if self.decode_s > 0 and self.decoded:
            parts.append(f"{self.decoded / self.decode_s:.1f} tok/s")
        if self.tokens:
            parts.append(f"first after {self.first_s / self.answers:.2f} s")
        if self.drafted:
            parts.append(f"{self.kept / self.rounds:.2f} of {self.drafted / self.rounds:.2f} guesses kept per round")
        return ", ".join(parts)


class Painter:
    """Colours the text of guessed tokens. `pieces` turns a token id into its text; a stop string may hold text back, so
    pieces wait here until a chunk delivers as many characters."""

    def __init__(self, pieces: Callable[[int], str]) -> None:
        self._pieces = pieces
        self._waiting: deque[tuple[str, bool]] = deque()

    def paint(self, chunk: Chunk) -> str:
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._waiting.append((self._pieces(token), origin == "drafted"))
        out, left = "", chunk.text
        while left:
            piece, guessed = self._waiting.popleft() if self._waiting else (left, False)
            shown, kept_back = left[: len(piece)], piece[len(left) :]
            if kept_back:
                self._waiting.appendleft((kept_back, guessed))
            out += f"{_GREEN}{safe(shown)}{_PLAIN}" if guessed and shown else safe(shown)
            left = left[len(shown) :]
        return out
