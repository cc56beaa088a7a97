"""How much of a draft is kept, learnt from rounds: acceptance by depth, with forgetting and a test for change."""

from __future__ import annotations

import math

PRIOR = 0.7  # acceptance of a drafter nobody has seen …
PRIOR_TOKENS = 2.0  # … as if so many tokens had been tested
CARRY = 4.0  # tokens' worth of belief that depth k behaves like depth k−1
FORGET = 0.98  # per drafting round at first, and again after a change …
STEADY = 0.995  # … rising to this while nothing changes
CALM = 0.98  # how slowly it rises
SHORT = 0.85  # memory of the test for change, per drafting round
CHANGED_SIGMAS = 3.0
UNEASY_SIGMAS = 2.5  # here the long memory is given up, but no more
SMALLEST = 1e-6  # scale of the counts before they are written anew
KEPT_AFTER_CHANGE = 3.0  # tested tokens at depth 1 that survive a change


class Acceptance:
    """Beliefs α_k = P(node k is accepted | it was drafted and those before it were accepted), k = 1, 2, …"""

    def __init__(self, prior: float = PRIOR) -> None:
        self._prior = prior
        self._tested: list[float] = []  # by depth, in units of `_scale`, so that forgetting touches one number
        self._kept: list[float] = []
        self._scale = 1.0
        self._surprise = self._variance = 0.0
        self._forget = FORGET
        self._beliefs: list[tuple[float, float]] = []  # (α_k, tested tokens behind it), until the next observation

    @property
    def weight(self) -> float:
        """Tested tokens at depth 1 that the belief rests on."""
        return self._scale * self._tested[0] if self._tested else 0.0

    def observe(self, drafted: int, kept: int, *, tested: int | None = None) -> bool:
        """One round's chain; True if it made the past implausible, so that most of it was forgotten.

        `tested`: how many guesses can be judged, if more than were drafted; `kept` counts those too.
        """
        if drafted <= 0:
            return False
        tested = drafted if tested is None else tested
        while len(self._tested) < tested:
            self._tested.append(0.0)
            self._kept.append(0.0)
        changed = self._changed(drafted, min(kept, drafted))
        if changed:
            self.forget(KEPT_AFTER_CHANGE)
        elif self._uneasy():
            self.forget(1.0 / (1.0 - FORGET))
            self._forget = FORGET
        self._forget = FORGET if changed else STEADY - CALM * (STEADY - self._forget)
        self._shrink(self._forget)
        one = 1.0 / self._scale
        for k in range(min(kept + 1, tested)):
            self._tested[k] += one
            if k < kept:
                self._kept[k] += one
        return changed

    def _shrink(self, share: float) -> None:
        self._beliefs = []
        self._scale *= share
        if self._scale < SMALLEST:
            self._tested = [n * self._scale for n in self._tested]
            self._kept = [n * self._scale for n in self._kept]
            self._scale = 1.0

    def forget(self, weight: float) -> None:
        """Keep the proportions, but let them weigh at most `weight` tested tokens at depth 1."""
        if self.weight > weight:
            self._shrink(weight / self.weight)

    def alphas(self, depth: int, *, sigmas: float = 0.0) -> list[float]:
        """α_1..α_depth, raised by so many standard deviations of the belief (at most to 1)."""
        if len(self._beliefs) < depth:
            self._beliefs = self._believe(depth)
        beliefs = self._beliefs[:depth]
        if not sigmas:
            return [alpha for alpha, _ in beliefs]
        return [min(1.0, alpha + sigmas * math.sqrt(alpha * (1.0 - alpha) / (weight + 1.0))) for alpha, weight in beliefs]

    def _believe(self, depth: int) -> list[tuple[float, float]]:
        beliefs: list[tuple[float, float]] = []
        alpha, carry, scale = self._prior, PRIOR_TOKENS, self._scale
        for tested, kept in zip(self._tested[:depth], self._kept, strict=False):
            weight = scale * tested + carry
            alpha = (scale * kept + carry * alpha) / weight
            beliefs.append((alpha, weight))
            carry = CARRY
        return beliefs + [(alpha, carry)] * (depth - len(beliefs))

    def _uneasy(self) -> bool:
        return abs(self._surprise) > UNEASY_SIGMAS * math.sqrt(self._variance + 0.25)

    def _changed(self, drafted: int, kept: int) -> bool:
        reach, mean, second = 1.0, 0.0, 0.0
        for k, alpha in enumerate(self.alphas(drafted), start=1):
            reach *= alpha
            mean += reach
            second += (2 * k - 1) * reach
        self._surprise = SHORT * self._surprise + (kept - mean)
        self._variance = SHORT * SHORT * self._variance + (second - mean * mean)
        if abs(self._surprise) <= CHANGED_SIGMAS * math.sqrt(self._variance + 0.25):
            return False
        self._surprise = self._variance = 0.0
        return self.weight > KEPT_AFTER_CHANGE
