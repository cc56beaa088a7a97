"""Baseline: lengthen the draft while most of it is kept, shorten it while most is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.core.device import DeviceProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.folding import HistoryFold
from edgespec.scheduling.limits import draft_limit

LENGTHEN_ABOVE = 0.85
SHORTEN_BELOW = 0.60


@dataclass(slots=True)
class _Window:
    gamma: int
    rounds: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])  # (drafted, kept), newest last

    @property
    def acceptance(self) -> float:
        return sum(kept for _, kept in self.rounds) / sum(drafted for drafted, _ in self.rounds)


class WindowPolicy:
    """Acceptance is the share kept of all nodes drafted in the last `window` rounds that drafted at all.

    After each such round: above .85 one node more (up to `longest`), below .60 one less (down to `shortest`).
    A length that was not tried, because the round was cut short, is not lengthened further.
    """

    def __init__(self, window: int = 8, *, first: int = 4, shortest: int = 1, longest: int = 16) -> None:
        if window < 1:
            raise ValueError(f"window must be >= 1 round, got {window}")
        if not 1 <= shortest <= first <= longest:
            raise ValueError(f"need 1 <= shortest <= first <= longest, got {shortest}, {first}, {longest}")
        self._window, self._shortest, self._longest = window, shortest, longest
        self._fold = HistoryFold(lambda: _Window(first), self._step)

    @property
    def name(self) -> str:
        return "window"

    @property
    def wants_entropy(self) -> bool:
        return False

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        seen = self._fold(history)
        reason = f"window acceptance {seen.acceptance:.2f}" if seen.rounds else "window is empty"
        return Plan(min(seen.gamma, draft_limit(state, knobs)), reason=reason)

    def _step(self, seen: _Window, trace: RoundTrace) -> _Window:
        if trace.drafted == 0:
            return seen
        seen.rounds.append((trace.drafted, trace.kept))
        if len(seen.rounds) > self._window:
            seen.rounds.popleft()
        if seen.acceptance > LENGTHEN_ABOVE and trace.planned >= seen.gamma:
            seen.gamma = min(seen.gamma + 1, self._longest)
        elif seen.acceptance < SHORTEN_BELOW:
            seen.gamma = max(min(seen.gamma, trace.planned) - 1, self._shortest)
        return seen
