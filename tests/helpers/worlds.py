"""Made-up machines with known costs and acceptance, to run policies against: no clock but their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec import analysis
from edgespec.core.device import DeviceProfile
from edgespec.core.drafter import Offer
from edgespec.core.plan import Knobs
from edgespec.core.policy import Policy
from edgespec.core.trace import RoundTrace
from tests.helpers.rounds import made_state


@dataclass(frozen=True)
class World:
    row_ms: Callable[[int], float]  # target time for so many rows
    draft_ms: float  # per draft token
    alphas: Sequence[float]  # acceptance by depth
    offers: float = 1.0  # chance that the drafter offers anything
    noise: float = 0.0  # relative deviation of every time
    spikes: float = 0.0  # share of rounds that take five times as long
    thermal: str | None = None
    overlap: float | None = None  # the drafter can draft ahead on a unit of its own, and slows the target by this factor meanwhile

    def round_ms(self, drafted: int, *, ahead: bool = False) -> float:
        """Expected; ahead, in the long run, what was not foreseen being half a pass under way when it is stopped."""
        row_ms, draft_ms = self.row_ms(drafted + 1), self.draft_ms * drafted
        if not ahead or self.overlap is None:
            return row_ms + draft_ms
        row_ms *= self.overlap
        foreseen = float(np.prod(self.alphas[: drafted + 1]))
        return row_ms + foreseen * max(0.0, draft_ms + self.draft_ms - row_ms) + (1 - foreseen) * (draft_ms + 0.5 * self.draft_ms)

    def tokens_per_ms(self, planned: int, *, ahead: bool = False) -> float:
        """Expected throughput of a fixed draft length."""
        slow = 1.0 + 4.0 * self.spikes
        ms = (1 - self.offers) * self.row_ms(1) + self.offers * self.round_ms(planned, ahead=ahead)
        return (1 + self.offers * analysis.expected_accepted(self.alphas[:planned])) / (ms * slow)

    def oracle(self, most: int = 16) -> float:
        """Throughput of the best fixed draft length, all costs known."""
        return max(self.tokens_per_ms(planned, ahead=ahead) for planned in range(most + 1) for ahead in (False, planned > 0))


def constant_world(one_ms: float, more_ms: float, draft_ms: float, alpha: float) -> World:
    return World(lambda rows: one_ms if rows == 1 else more_ms, draft_ms, [alpha] * 32)


def random_world(rng: np.random.Generator) -> World:
    """Rows cost along a line, a root or steps; acceptance constant, falling or rising; sometimes a drafter that rarely offers."""
    one = float(rng.uniform(5, 80))
    eight = float(rng.uniform(1.1, 5))  # v(8)
    kind = rng.integers(3)

    def row_ms(rows: int) -> float:
        width = 1 if rows == 1 else 1 << (rows - 1).bit_length() if kind == 2 else rows
        share = ((width - 1) / 7) ** (0.6 if kind == 1 else 1.0)
        return one * (1 + (eight - 1) * share)

    first = float(rng.uniform(0.1, 0.95))
    factor = float(rng.choice([1.0, 0.93, 1.02]))
    alphas = [min(0.97, first * factor**k) for k in range(32)]
    rare = bool(rng.random() < 0.25)
    return World(
        row_ms,
        0.0 if rare else one * float(rng.uniform(0.02, 0.5)),
        alphas,
        offers=float(rng.uniform(0.1, 0.9)) if rare else 1.0,
        noise=0.05,
        spikes=0.01,
    )


def play(
    world: World,
    policy: Policy,
    rounds: int,
    rng: np.random.Generator,
    *,
    history: list[RoundTrace] | None = None,
    profile: DeviceProfile | None = None,
    knobs: Knobs | None = None,
) -> list[RoundTrace]:
    """`history` grown by so many rounds of this world (the same list)."""
    history = [] if history is None else history
    profile, knobs = profile or DeviceProfile.generic(), knobs or Knobs()
    offers = (Offer("model", ahead=True),) if world.overlap is not None else ()
    ready, stopping_ms = 0, 0.0  # nodes made ahead, and the wait for their maker
    for _ in range(rounds):
        plan = policy(history, made_state(room=10_000, offers=offers), profile, knobs)
        drafted = plan.draft_tokens if rng.random() < world.offers else 0
        kept = 0
        while kept < drafted and rng.random() < world.alphas[kept]:
            kept += 1
        slow = (5.0 if rng.random() < world.spikes else 1.0) * max(0.5, 1.0 + world.noise * rng.standard_normal())
        ahead = plan.ahead > 0 and drafted > 0
        predrafted = min(ready, drafted)
        verify = world.row_ms(drafted + 1) * slow * (world.overlap or 1.0 if ahead else 1.0)
        draft = world.draft_ms * (drafted - predrafted) * slow + stopping_ms
        history.append(
            RoundTrace(
                round=len(history),
                context_len=100,
                drafter="model",
                planned=plan.draft_tokens,
                drafted=drafted,
                kept=kept,
                emitted=kept + 1,
                rows=drafted + 1,
                ahead=int(ahead),
                predrafted=predrafted,
                draft_ms=draft,
                offer_ms=stopping_ms,
                verify_ms=verify,
                round_ms=draft + verify,
                thermal=world.thermal,
                reason=plan.reason,
                offers=offers,
            )
        )
        ready, stopping_ms = 0, 0.0
        if ahead and kept == drafted and rng.random() < world.alphas[drafted]:
            ready, stopping_ms = drafted, max(0.0, world.draft_ms * (drafted + 1) - verify)
        elif ahead:
            stopping_ms = world.draft_ms * rng.random()
    return history


def throughput(history: Sequence[RoundTrace]) -> float:
    return sum(t.emitted for t in history) / sum(t.round_ms for t in history)


def expected_throughput(world: World, history: Sequence[RoundTrace]) -> float:
    """Tokens per ms that these plans bring on average: the luck of single rounds taken out."""
    tokens = sum(1 + world.offers * analysis.expected_accepted(world.alphas[: trace.planned]) for trace in history)
    ms = sum(
        (1 - world.offers) * world.row_ms(1) + world.offers * world.round_ms(trace.planned, ahead=trace.ahead > 0) for trace in history
    )
    return tokens / (ms * (1.0 + 4.0 * world.spikes))


def changed(world: World, rng: np.random.Generator) -> World:
    """The same machine under another load, with a text of another kind."""
    load = float(rng.uniform(0.7, 1.6))
    alpha = float(rng.uniform(0.1, 0.95))
    row_ms, draft_ms = world.row_ms, world.draft_ms
    return replace(world, row_ms=lambda rows: load * row_ms(rows), draft_ms=load * draft_ms, alphas=[alpha] * len(world.alphas))
