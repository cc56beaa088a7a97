"""Several drafters kept in step, any of which may guess a round; one that fails rests, and is started anew later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import Draft
from edgespec.core.drafter import Drafter, Offer, Trial
from edgespec.core.errors import Cancelled, ContractError
from edgespec.core.sampling import Sampling
from edgespec.core.verdict import Outcome
from edgespec.drafting.ahead import AheadDrafter

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_REST, LONGEST_REST = 8, 512  # rounds that a failed drafter sits out, doubled by every failure in a row


@dataclass(slots=True, eq=False)
class _Member:
    drafter: Drafter
    resting: int = 0  # rounds still to sit out
    failures: int = 0  # in a row
    lost: bool = False  # it missed something since it was started


class Pool:
    """A text cannot depend on its drafters, so neither can it fail with them: whatever one raises is noted and the round goes on.

    Cancelling and broken contracts (bugs of ours) pass through. The first drafter is the one that plans mean when they name none.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters or len({drafter.name for drafter in drafters}) < len(drafters):
            raise ValueError(f"a pool needs drafters of different names, got {[drafter.name for drafter in drafters]}")
        self._members = {drafter.name: _Member(drafter) for drafter in drafters}
        self._sampling = Sampling()
        self._cancel: CancelToken | None = None
        self._known: list[int] = []  # for starting a member anew
        self._faults: list[str] = []

    @property
    def name(self) -> str:
        """Of the first drafter that can be asked; of the first one if none can."""
        return next((name for name, member in self._members.items() if not member.resting), next(iter(self._members)))

    @property
    def engine_ms(self) -> float:
        """Wall time inside engine calls so far, of all drafters."""
        return sum(member.drafter.engine_ms for member in self._members.values())

    @property
    def wants_features(self) -> bool:
        return any(member.drafter.wants_features for member in self._members.values())

    def faults(self) -> tuple[str, ...]:
        """What failed since this was last asked."""
        found, self._faults = tuple(self._faults), []
        return found

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, cancel: CancelToken | None = None) -> None:
        self._known, self._sampling, self._cancel = [int(t) for t in prompt_ids], sampling, cancel
        for member in self._members.values():
            if not member.resting:
                self._start(member)

    def offers(self, max_tokens: int) -> tuple[Offer, ...]:
        """One from every drafter that is not resting."""
        offers: list[Offer] = []
        for member in self._members.values():
            if not member.resting:
                offer = self._guarded(member, lambda drafter: drafter.offer(max_tokens))
                if offer is not None:
                    offers.append(offer)
        return tuple(offers)

    def next_entropy(self) -> float | None:
        """Of the drafter that plans mean when they name none."""
        member = self._members[self.name]
        return self._guarded(member, lambda drafter: drafter.next_entropy()) if not member.resting else None

    def propose(self, name: str, max_tokens: int, rng: np.random.Generator) -> Draft:
        """At most `max_tokens` nodes by the named drafter ("": the first that can be asked). ContractError for a stranger."""
        name = name or self.name
        if name not in self._members:
            raise ContractError(f"the plan names the drafter {name!r}; there are {', '.join(self._members)}")
        member = self._members[name]
        draft = self._guarded(member, lambda drafter: drafter.propose(max_tokens, rng)) if max_tokens and not member.resting else None
        return Draft.empty(context_len=len(self._known), source=name) if draft is None else draft

    def draft_ahead(self, draft: Draft, max_tokens: int, rng: np.random.Generator) -> bool:
        """Let the drafter of `draft` guess on for the next round while this one is verified. False if it cannot, or does not now."""
        member = self._members.get(draft.source)  # None: made by a drafter within a drafter
        if member is None or member.resting or not isinstance(drafter := member.drafter, AheadDrafter):
            return False
        return bool(self._guarded(member, lambda _: drafter.draft_ahead(draft, max_tokens, rng)))

    def observe(self, outcome: Outcome) -> tuple[Trial, ...]:
        """What became of the offers, of the drafters that know it."""
        self._known += outcome.verdict.tokens(outcome.draft)
        trials: list[Trial] = []
        for member in self._members.values():
            if member.resting:
                member.resting -= 1
                if not member.resting:
                    self._start(member)
                continue
            observed = self._guarded(member, lambda drafter: (drafter.observe(outcome),))
            if observed is None:
                continue
            if observed[0] is not None:
                trials.append(observed[0])
            if outcome.draft.source == member.drafter.name:
                member.failures = 0
        return tuple(trials)

    def close(self) -> None:
        for member in self._members.values():
            self._guarded(member, lambda drafter: drafter.close())

    def _start(self, member: _Member) -> None:
        def anew(drafter: Drafter) -> bool:
            if member.lost:
                drafter.close()  # whatever it had read is in doubt
            drafter.start(self._known, sampling=self._sampling, cancel=self._cancel)
            return True

        if self._guarded(member, anew):
            member.lost = False

    def _guarded(self, member: _Member, call: Callable[[Drafter], T]) -> T | None:
        """What the call returns; None if it fails, after which the member rests."""
        try:
            return call(member.drafter)
        except (Cancelled, ContractError):
            raise
        except Exception as error:  # a foreign library may raise anything
            name = member.drafter.name
            member.resting = min(FIRST_REST << member.failures, LONGEST_REST)
            member.failures, member.lost = member.failures + 1, True
            self._faults.append(f"{name}: {type(error).__name__}: {error}")
            log.warning("drafter %s failed and rests for %d rounds: %s", name, member.resting, error)
            return None
