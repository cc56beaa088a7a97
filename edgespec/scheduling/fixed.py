"""Always the same draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.device import DeviceProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.limits import draft_limit


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """`draft_tokens` nodes a round; 0 is plain decoding."""

    draft_tokens: int

    def __post_init__(self) -> None:
        if self.draft_tokens < 0:
            raise ValueError(f"draft_tokens must be >= 0, got {self.draft_tokens}")

    @property
    def name(self) -> str:
        return f"fixed:{self.draft_tokens}"

    @property
    def wants_entropy(self) -> bool:
        return False

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        return Plan(min(self.draft_tokens, draft_limit(state, knobs)), reason="fixed")
