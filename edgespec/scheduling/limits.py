"""The bound that every policy keeps: what can be delivered, what the user allows, what the battery allows."""

from __future__ import annotations

from edgespec.core.plan import Knobs
from edgespec.core.policy import RoundState


def draft_limit(state: RoundState, knobs: Knobs) -> int:
    """Most nodes that may be drafted this round, >= 0."""
    power = state.power
    if power is not None and power.source != "ac" and power.battery is not None and power.battery < knobs.min_battery:
        return 0
    return max(0, min(state.room, knobs.max_draft_tokens))
