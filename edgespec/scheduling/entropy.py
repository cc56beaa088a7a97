"""Baseline: the surer the drafter is of its next token, the further it may guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.device import DeviceProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.limits import draft_limit

SURE_NATS, FAIR_NATS = 0.5, 1.0
SURE, FAIR, UNSURE = 8, 4, 1  # draft lengths


@dataclass(frozen=True, slots=True)
class EntropyPolicy:
    """Below .5 nats up to 8 nodes, below 1 nat up to 4, else 1. A drafter without a law (fixed guesses) gets 4."""

    @property
    def name(self) -> str:
        return "entropy"

    @property
    def wants_entropy(self) -> bool:
        return True

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        entropy = state.draft_entropy
        if entropy is None:
            wanted, reason = FAIR, "the drafter has no law"
        else:
            wanted = SURE if entropy < SURE_NATS else FAIR if entropy < FAIR_NATS else UNSURE
            reason = f"draft entropy {entropy:.2f} nats"
        return Plan(min(wanted, draft_limit(state, knobs)), reason=reason)
