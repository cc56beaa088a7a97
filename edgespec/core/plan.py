"""What the user allows (Knobs), and what one round does and why (Plan)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Energy = Literal["fast", "balanced", "saver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The user's limits; the runtime never changes them."""

    lossless: bool = True
    max_draft_tokens: int = 16
    target_ms_per_token: float | None = None
    energy: Energy = "balanced"
    min_battery: float = 0.0  # share 0..1 below which nothing is drafted

    def __post_init__(self) -> None:
        if not isinstance(self.max_draft_tokens, int) or self.max_draft_tokens < 0:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ValueError(f"max_draft_tokens must be a whole number >= 0, got {self.max_draft_tokens}")
        if self.energy not in get_args(Energy):
            raise ValueError(f"energy must be {', '.join(get_args(Energy))}; got {self.energy!r}")
        if not 0.0 <= self.min_battery <= 1.0:
            raise ValueError(f"min_battery is a share between 0 and 1, got {self.min_battery}")
        if self.target_ms_per_token is not None and not self.target_ms_per_token > 0:  # also catches NaN
            raise ValueError(f"target_ms_per_token must be > 0, got {self.target_ms_per_token}")


@dataclass(frozen=True, slots=True)
class Plan:
    """`draft_tokens` is the most nodes to draft this round; 0 means plain decoding."""

    draft_tokens: int
    reason: str = ""
    drafter: str = ""  # empty: the session's own
    depth: int | None = None
    rows: int | None = None
    unit: str = ""  # where the target runs; empty: where it is
    ahead: int = 0  # outcomes to pre-draft while the target verifies
    pause_ms: float = 0.0
