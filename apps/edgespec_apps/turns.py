"""What one answer looked like: the status line, and the colours of guessed text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from edgespec_apps.console import safe

if TYPE_CHECKING:
    from edgespec.core.chunk import Answer, Chunk, Stats

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def status(answers: Sequence[Stats]) -> str:
    """For instance "38 tokens, 21.3 tok/s, first after 0.21 s, 1.80 of 4.00 guesses kept per round"."""
    tokens, rounds = sum(s.tokens for s in answers), sum(s.rounds for s in answers)
    seconds = sum(s.tokens / s.tok_s for s in answers if s.tok_s > 0)
    drafted, kept = sum(s.drafted for s in answers), sum(s.kept for s in answers)
    parts = [count(tokens, "token")]
    if seconds > 0:
        parts.append(f"{tokens / seconds:.1f} tok/s")
        parts.append(f"first after {sum(s.ttft_s for s in answers) / len(answers):.2f} s")
    if drafted:
        parts.append(f"{kept / rounds:.2f} of {drafted / rounds:.2f} guesses kept per round")
    return ", ".join(parts)


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def ending(answer: Answer, max_tokens: int) -> str:
    """Why an answer ended before the model had ended it; empty if the model did."""
    if answer.finish == "cancelled":
        return "stopped"
    if answer.finish == "length":
        return f"stopped at the limit of {count(max_tokens, 'token')}" if len(answer.token_ids) == max_tokens else "the context is full"
    return ""


class Painter:
    """Colours the text of guessed tokens. `pieces` turns a token id into its text; a stop string may hold text back, so
    pieces wait here until a chunk delivers as many characters."""

    def __init__(self, pieces: Callable[[int], str]) -> None:
        self._pieces = pieces
        self._waiting: deque[tuple[str, bool]] = deque()

    def paint(self, chunk: Chunk) -> str:
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            if piece := self._pieces(token):
                self._waiting.append((piece, origin == "drafted"))
        runs: list[tuple[str, bool]] = []  # text, whether it was guessed
        left = chunk.text
        while left:
            piece, guessed = self._waiting.popleft() if self._waiting else (left, False)
            if held_back := piece[len(left) :]:
                self._waiting.appendleft((held_back, guessed))
            runs.append((left[: len(piece)], guessed))
            left = left[len(piece) :]
        return "".join(_coloured("".join(text for text, _ in run), guessed) for guessed, run in groupby(runs, key=itemgetter(1)))


def _coloured(text: str, guessed: bool) -> str:
    return f"{_GREEN}{safe(text)}{_PLAIN}" if guessed else safe(text)
