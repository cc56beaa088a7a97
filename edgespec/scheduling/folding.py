"""Fold a growing history without reading it again every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgespec.core.trace import RoundTrace

S = TypeVar("S")

_REMEMBERED = 8  # sessions that may share one policy object before states are folded anew


@dataclass(slots=True)
class _Entry(Generic[S]):
    state: S
    length: int
    last: RoundTrace | None


class HistoryFold(Generic[S]):
    """`fold(history)` is `step(step(start(), history[0]), …)`; what was folded before is continued, not repeated.

    Only a memo: the result depends on the history alone. A history is recognised by the identity of its last folded
    record (records are frozen and histories only grow), so several sessions may share one policy.
    """

    def __init__(self, start: Callable[[], S], step: Callable[[S, RoundTrace], S]) -> None:
        self._start, self._step = start, step
        self._entries: list[_Entry[S]] = []

    def __call__(self, history: Sequence[RoundTrace]) -> S:
        entry = self._entry(history)
        length, entry.length = entry.length, 0  # what an interrupt leaves half folded is folded anew
        for trace in history[length:]:
            entry.state = self._step(entry.state, trace)
        entry.length = len(history)
        entry.last = history[-1] if history else None
        return entry.state

    def _entry(self, history: Sequence[RoundTrace]) -> _Entry[S]:
        for entry in self._entries:
            if 0 < entry.length <= len(history) and history[entry.length - 1] is entry.last:
                return entry
        entry = _Entry(self._start(), 0, None)
        self._entries = [entry, *self._entries[: _REMEMBERED - 1]]
        return entry
