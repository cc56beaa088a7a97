"""One record per round: the scheduler's memory, the profiler's JSONL line, the tests' evidence."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.drafter import Offer, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """Times in milliseconds of wall clock. `planned` is what the policy allowed, `drafted` the nodes scored, `kept` those accepted,
    `emitted` the tokens delivered. `round_ms` runs from planning to committing, `text_ms` is what turning the tokens into text took
    after it. `overhead_ms` is the part of both that was spent outside engine calls, the target's or the drafter's."""

    round: int
    context_len: int  # tokens committed to the target's cache before the round
    drafter: str
    planned: int
    drafted: int
    kept: int
    emitted: int
    rows: int  # rows the target scored
    plan_ms: float = 0.0
    ahead: int = 0  # outcomes that were drafted for while the target verified: its pass was disturbed
    predrafted: int = 0  # of `drafted`, how many were made ahead, in the round before
    draft_ms: float = 0.0  # the drafter, its own engine calls included
    offer_ms: float = 0.0  # of which before the plan; what was drafted ahead is waited for here
    draft_engine_ms: float = 0.0  # of which in engine calls
    verify_ms: float = 0.0  # the target's forward pass
    judge_ms: float = 0.0
    commit_ms: float = 0.0
    round_ms: float = 0.0
    text_ms: float = 0.0
    host_bytes_copied: int = 0
    entropy_nats: float | None = None
    energy_mj: float | None = None
    thermal: str | None = None
    temperature_c: float | None = None
    reason: str = ""
    offers: tuple[Offer, ...] = ()  # what the policy could choose from
    trials: tuple[Trial, ...] = ()  # what became of them, where it is known
    faults: tuple[str, ...] = ()  # drafters that failed in this round, and how; the answer went on without them

    @property
    def overhead_ms(self) -> float:
        return max(0.0, self.round_ms + self.text_ms - self.draft_engine_ms - self.verify_ms)
