"""Made-up rounds for scheduler tests."""

from __future__ import annotations

from edgespec.core.drafter import Offer
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace


def made_round(
    index: int = 0,
    *,
    planned: int = 4,
    drafted: int | None = None,
    kept: int = 0,
    draft_ms: float = 0.0,
    verify_ms: float = 10.0,
    drafter: str = "model",
    thermal: str | None = None,
    context_len: int = 100,
    other_ms: float = 0.0,
    reason: str = "",
    offers: tuple[Offer, ...] = (),
) -> RoundTrace:
    drafted = planned if drafted is None else drafted
    return RoundTrace(
        round=index,
        context_len=context_len,
        drafter=drafter,
        planned=planned,
        drafted=drafted,
        kept=kept,
        emitted=kept + 1,
        rows=drafted + 1,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        round_ms=draft_ms + verify_ms + other_ms,
        thermal=thermal,
        reason=reason,
        offers=offers,
    )


def made_state(
    *, room: int = 1000, context_len: int = 100, entropy: float | None = None, drafter: str = "model", offers: tuple[Offer, ...] = ()
) -> RoundState:
    return RoundState(context_len=context_len, room=room, draft_entropy=entropy, drafter=drafter, offers=offers)
