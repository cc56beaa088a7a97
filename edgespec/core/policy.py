from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.drafter import Offer
from edgespec.core.plan import Knobs, Plan
from edgespec.core.trace import RoundTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """What is true as the round begins. `room` is the most draft nodes that could still be delivered.

    `offers`: one from every drafter that can be asked this round; a plan may name any of them, and none means `drafter`.
    `units`: those the target can run on this round; a plan moves it among these and to no other.
    """

    context_len: int
    room: int
    drafter: str = ""
    offers: tuple[Offer, ...] = ()
    draft_entropy: float | None = None  # nats; only when the policy wants it and the drafter has a law
    power: PowerThermalState | None = None
    units: tuple[str, ...] = ()


class Policy(Protocol):
    """Plans; pure. Time and randomness enter only as data, so the same history always gives the same plan."""

    @property
    def name(self) -> str: ...
    @property
    def wants_entropy(self) -> bool: ...
    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan: ...
