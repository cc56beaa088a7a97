"""What each draft length should bring, from measured costs and measured acceptance.

With c_m the target's time for m rows, d the drafter's per token, o what else a round costs, h the chance that the drafter offers
anything, r_k the chance that an offer has k tokens and α_i acceptance at position i, a round of at most γ tokens

    gives  1 + h Σ_{k<=γ} r_k Π_{i<=k} α_i  tokens  and takes  o + (1−h)(c_1 + miss) + h Σ_n P(n offered)(c_{n+1} + n d)  ms.

Plain decoding takes c_1 + o per token. The scheduler decides by the same sums, from what it sees while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec_device_profiles.measured import Kind, Measured

CARRY = 2.0  # tokens' worth of belief that a position behaves like the one before it
MARGIN = 0.03  # differences below this are noise: the shorter draft, or none, is as good and wastes less


@dataclass(frozen=True, slots=True)
class Step:
    """A draft length γ: expected tokens and ms per round, and speed against plain decoding."""

    draft_tokens: int
    tokens: float
    ms: float
    speed_up: float


def alphas(kind: Kind) -> list[float]:
    """Acceptance by position, as far as anything was tested; thin evidence leans on the position before."""
    out: list[float] = []
    for tested, kept in zip(kind.tested, kind.kept, strict=True):
        if tested == 0:
            break
        out.append((kept + CARRY * out[-1]) / (tested + CARRY) if out else kept / tested)
    return out


def outlook(measured: Measured, kind: Kind) -> list[Step]:
    """Steps for γ = 0, 1, …; empty if costs or acceptance were not measured."""
    plain_ms = measured.round_ms(1, kind.context, 0)
    if plain_ms is None or kind.rounds == 0:
        return []
    plain_ms -= measured.draft.miss_ms or 0.0  # plain decoding does not ask the drafter
    steps = [Step(0, 1.0, plain_ms, 1.0)]
    reach = [offers / kind.rounds for offers in kind.offered]  # h r_k
    gain, path = 0.0, 1.0
    for gamma, alpha in enumerate(alphas(kind), start=1):
        path *= alpha
        gain += reach[gamma - 1] * path
        ms = _expected_ms(measured, kind, [1.0, *reach[:gamma]])
        steps.append(Step(gamma, 1.0 + gain, ms, (1.0 + gain) * plain_ms / ms))
    return steps


def _expected_ms(measured: Measured, kind: Kind, reach: Sequence[float]) -> float:
    """Mean round over the lengths that the drafter really offers: `reach[n]` is the chance of n tokens or more."""
    total = 0.0
    for n, (at_least, more) in enumerate(zip(reach, [*reach[1:], 0.0], strict=True)):
        total += (at_least - more) * (measured.round_ms(n + 1, kind.context, n) or 0.0)
    return total


def best(steps: Sequence[Step]) -> Step | None:
    """The shortest draft that is as good as any; γ = 0 if none is worth it, None if nothing is known."""
    if not steps:
        return None
    top = max(step.speed_up for step in steps)
    enough = max(1.0 + MARGIN, top * (1.0 - MARGIN))
    return next((step for step in steps if step.speed_up >= enough), steps[0])
