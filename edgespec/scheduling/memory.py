"""What the recorded rounds say, for a policy that plans from costs: what rows cost, what each drafter costs, and how much is kept.

Acceptance is learnt per *arm*: a drafter at one level of confidence. A match of one token and a match of ten are different bets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from edgespec.core.drafter import Offer, Trial
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.acceptance import Acceptance
from edgespec.scheduling.costs import Disturbance, DraftCosts, RowCosts, ahead_ms

HOT = frozenset({"serious", "critical"})
DETOUR = "looking"  # in a plan's reason: not the path
FIRST_INTERVAL, LAST_INTERVAL = 4, 30  # rounds without it between looks at a parked arm
CARRIED = 30.0  # tested tokens that beliefs weigh when an answer begins: another text may be of another kind
LOOK_WEIGHT = 1.5  # tested tokens that old beliefs weigh when a parked arm is looked at
PROMISING = 0.7
PACE = 0.97  # memory of what follows a setting, per time

ArmKey = tuple[str, int]  # (drafter, level of confidence)
Setting = tuple[ArmKey, ...]  # what a round could choose from
Choice = tuple[str, int]  # (drafter, draft length); ("", 0) is plain decoding


def arm_of(offer: Offer) -> ArmKey:
    return offer.drafter, offer.confidence


def setting_of(offers: tuple[Offer, ...]) -> Setting:
    return tuple(arm_of(offer) for offer in offers if offer.tokens != 0)


@dataclass(slots=True)
class Arm:
    """What the history says of one drafter at one level of confidence."""

    acceptance: Acceptance
    tried: bool = False  # what becomes of its offers is known without asking it
    asked: float = 0.0  # rounds it was asked, discounted
    offered: float = 0.0  # those in which it offered nodes
    miss_ms: float = 0.0
    last_miss_ms: float = 0.0
    long_enough: list[float] = field(default_factory=list[float])  # offers of at least k+1 nodes where so many were allowed
    allowed: list[float] = field(default_factory=list[float])
    parked: int = 0  # rounds it could have guessed and did not, since it last offered anything
    looks: int = 0  # fruitless looks since it last ran freely
    streak: int = 0  # offers since it was last parked
    run_kept: int = 0  # tokens accepted since it was last parked
    run_refused: int = 0  # and refused

    @classmethod
    def new(cls, offer: Offer) -> Self:
        """One that has never been asked."""
        return cls(Acceptance() if offer.expected is None else Acceptance(offer.expected))

    @property
    def unknown(self) -> bool:
        return self.acceptance.weight == 0.0

    def observe(self, trace: RoundTrace, trial: Trial | None, *, stated: bool) -> None:
        """A round in which it was asked. `stated`: its offer said how long it was, so that there is no length to learn."""
        self.asked = 0.95 * self.asked + 1.0
        self.offered = 0.95 * self.offered + (trace.drafted > 0)
        if trace.drafted == 0:
            self.miss_ms += 0.2 * (min(trace.draft_ms, self.last_miss_ms) - self.miss_ms)  # a long one must repeat itself
            self.last_miss_ms = trace.draft_ms
            return
        if self.parked >= FIRST_INTERVAL:
            if not self.tried:
                self.acceptance.forget(LOOK_WEIGHT)
            self.looks, self.streak = self.looks + 1, 0
            self.run_kept = self.run_refused = 0
        self.parked = 0
        self.streak += 1
        self.run_kept += trace.kept
        self.run_refused += trace.kept < trace.drafted
        if self.streak > FIRST_INTERVAL:
            self.looks = 0
        if trial is None:
            self.acceptance.observe(trace.drafted, trace.kept)
        else:
            self.tried = True
            self.acceptance.observe(trace.drafted, trial.right, tested=max(trace.drafted, trial.tested))
        if stated:
            return
        while len(self.allowed) < trace.planned:
            self.allowed.append(0.0)
            self.long_enough.append(0.0)
        for k in range(trace.planned):
            self.allowed[k] = 0.95 * self.allowed[k] + 1.0
            self.long_enough[k] = 0.95 * self.long_enough[k] + (trace.drafted > k)

    def overhear(self, trial: Trial) -> None:
        """A round in which it was not asked, and is known to have been right or wrong."""
        self.tried = True
        self.acceptance.observe(trial.tested, trial.right)

    @property
    def promising(self) -> bool:
        """Most of what was tested since it was last parked was accepted."""
        return self.run_kept > PROMISING * (self.run_kept + self.run_refused)

    @property
    def undecided(self) -> bool:
        """Its last run said something for it and something against it."""
        return 0 < self.run_refused <= self.run_kept

    def rest(self) -> None:
        """A round without it."""
        self.parked += 1

    @property
    def offers(self) -> float:
        """Chance that it offers anything when asked; an unknown drafter always does."""
        return (self.offered + 0.5) / (self.asked + 0.5)

    def reaches(self, depth: int) -> list[float]:
        """Chance that an offer has at least 1, 2, … nodes if `depth` are allowed; like the last known depth beyond it."""
        known = [(n + 0.5) / (of + 0.5) for n, of in zip(self.long_enough[:depth], self.allowed, strict=False)]
        return known + [known[-1] if known else 1.0] * (depth - len(known))


@dataclass(slots=True)
class Drafting:
    """What a drafter's guesses cost, at whatever level of confidence."""

    cool: DraftCosts = field(default_factory=DraftCosts)
    hot: DraftCosts | None = None

    def observe(self, trace: RoundTrace) -> None:
        if trace.predrafted or not trace.drafted:  # made ahead it cost nothing, or a wait
            return
        if trace.thermal in HOT:
            self.hot = self.hot or DraftCosts()
        self.costs(trace.thermal in HOT).observe(trace.drafted, trace.draft_ms - trace.offer_ms)

    def costs(self, hot: bool) -> DraftCosts:
        return self.cool if not hot or self.hot is None else self.hot


@dataclass(slots=True)
class Path:
    """What was chosen in one setting, the last time and as a rule (a detour becomes the rule if planned again), and what it brings.

    `cost` and `energy_cost` are those of an expected round in plain decoding's cost of one; `next` counts the settings that followed
    this one, discounted.
    """

    last: Choice = ("", -1)
    incumbent: Choice = ("", -1)
    whole: bool = False  # the incumbent was all that was offered
    next: dict[Setting, float] = field(default_factory=dict[Setting, float])
    ahead: bool = False  # the last time, detours apart
    cost: float = 1.0
    energy_cost: float = 1.0
    tokens: float = 1.0

    def mixed(self, energy_weight: float) -> float:
        return (1.0 - energy_weight) * self.cost + energy_weight * self.energy_cost


@dataclass(slots=True)
class Memory:
    """The folded history."""

    cool: RowCosts = field(default_factory=RowCosts)
    hot: RowCosts | None = None  # hot rounds have a book of their own: they never overwrite what the cool machine can do
    energy: RowCosts = field(default_factory=RowCosts)  # mJ per round by rows
    watts: float | None = None  # mJ per ms, averaged
    beside: Disturbance = field(default_factory=Disturbance)  # of the target's time by a drafter at work
    beside_energy: Disturbance = field(default_factory=Disturbance)
    arms: dict[ArmKey, Arm] = field(default_factory=dict[ArmKey, Arm])
    drafting: dict[str, Drafting] = field(default_factory=dict[str, Drafting])  # by drafter
    paths: dict[Setting, Path] = field(default_factory=dict[Setting, Path])
    lately: Path | None = None  # of the last round
    thermal: str | None = None
    ms_since_detour: float = 0.0
    elapsed_ms: float = 0.0
    lost_ms: float = 0.0  # against plain decoding; what was won before does not pay for it

    def arm(self, offer: Offer) -> Arm:
        """What is known of this drafter at this level; nothing is stored for one that was never asked."""
        return self.arms.get(arm_of(offer)) or Arm.new(offer)

    def draft_costs(self, drafter: str, hot: bool) -> DraftCosts:
        """What is known of them; nothing is stored for a drafter that was never asked."""
        return (self.drafting.get(drafter) or Drafting()).costs(hot)

    def path(self, setting: Setting) -> Path:
        return self.paths.setdefault(setting, Path())

    def book(self, hot: bool) -> RowCosts:
        return self.cool if not hot or self.hot is None else self.hot


def learn(memory: Memory, trace: RoundTrace) -> Memory:
    """One round more."""
    offers = trace.offers or (Offer(trace.drafter),)
    if trace.round == 0:
        for arm in memory.arms.values():
            arm.acceptance.forget(CARRIED)
        for book in (memory.cool, memory.hot):
            if book is not None:
                book.begin()
    target_ms = trace.verify_ms + trace.judge_ms + trace.commit_ms
    hot = trace.thermal in HOT
    memory.thermal = trace.thermal
    if hot:
        memory.hot = memory.hot or memory.cool.copy()
    _observe(memory.book(hot), memory.beside, trace, target_ms)
    plain_ms = memory.book(hot).ms(1)
    round_ms = _undisturbed(target_ms + trace.draft_ms, trace, plain_ms)
    memory.elapsed_ms += round_ms
    if trace.planned > 0 and plain_ms is not None:
        memory.lost_ms = max(0.0, memory.lost_ms + round_ms - trace.emitted * plain_ms)
    _learn_energy(memory, trace, target_ms + trace.draft_ms)
    asked: Arm | None = None
    trials = {trial.drafter: trial for trial in trace.trials}
    for offer in offers:
        trial = trials.get(offer.drafter)
        if trace.planned > 0 and offer.drafter == trace.drafter:
            asked = memory.arms.setdefault(arm_of(offer), memory.arm(offer))
            asked.observe(trace, trial, stated=offer.tokens is not None)
            memory.drafting.setdefault(offer.drafter, Drafting()).observe(trace)
        elif trial is not None:
            overheard = memory.arms.setdefault(arm_of(offer), memory.arm(offer))
            overheard.overhear(trial)
            overheard.rest()
        elif offer.tokens != 0 and (known := memory.arms.get(arm_of(offer))) is not None:
            known.rest()
    setting = setting_of(offers)
    path = memory.path(setting)
    if (before := memory.lately) is not None:
        before.next = {follower: PACE * weight for follower, weight in before.next.items()}
        before.next[setting] = before.next.get(setting, 0.0) + 1.0
    memory.lately = path
    _keep_pace(memory, path, trace, asked, hot)
    _keep_to(memory, path, trace, offers, round_ms)
    return memory


def _learn_energy(memory: Memory, trace: RoundTrace, busy_ms: float) -> None:
    """A meter that is missing, stood still or went wrong says nothing."""
    if trace.energy_mj is None or not 0 < trace.energy_mj < math.inf or busy_ms <= 0:
        return
    _observe(memory.energy, memory.beside_energy, trace, trace.energy_mj)
    watts = trace.energy_mj / busy_ms
    memory.watts = watts if memory.watts is None else memory.watts + 0.05 * (watts - memory.watts)


def _undisturbed(round_ms: float, trace: RoundTrace, plain_ms: float | None) -> float:
    """What the accounts are charged with: at most twice plain decoding for every row and every node.

    A process that was stopped, or a machine that slept, would otherwise owe them minutes, and never look at a drafter again.
    """
    return round_ms if plain_ms is None else min(round_ms, 2.0 * (trace.rows + trace.planned) * plain_ms)


def _observe(book: RowCosts, beside: Disturbance, trace: RoundTrace, cost: float) -> None:
    """Only undisturbed rounds say what rows cost; the others, how much a drafter at work adds to that."""
    if not trace.ahead:
        book.observe(trace.rows, cost)
        beside.rest()
        return
    known = book.ms(trace.rows)
    if known:
        beside.observe(cost / known)
    book.skip()


def _keep_pace(memory: Memory, path: Path, trace: RoundTrace, asked: Arm | None, hot: bool) -> None:
    """Expected figures rather than this round's: luck must not move the plan."""
    book = memory.book(hot)
    plain_ms, row_ms = book.ms(1), book.ms(trace.rows)
    if plain_ms is None or row_ms is None:
        return
    path.cost, path.tokens = row_ms / plain_ms, 1.0
    if asked is not None and trace.drafted:
        costs, reach = memory.draft_costs(trace.drafter, hot), 1.0
        *alphas, behind = asked.acceptance.alphas(trace.drafted + 1)
        for alpha in alphas:
            reach *= alpha
            path.tokens += reach
        draft_ms = costs.ms(trace.drafted)
        if trace.ahead:
            round_ms = ahead_ms(row_ms, draft_ms, costs.line[1], factor=memory.beside.factor(1.0), foreseen=reach * behind)
            path.cost = round_ms / plain_ms
        else:
            path.cost += draft_ms / plain_ms
    plain_mj, row_mj = memory.energy.ms(1), memory.energy.ms(trace.rows)
    if plain_mj is None or row_mj is None:
        path.energy_cost = path.cost
    else:
        path.energy_cost = row_mj / plain_mj * (memory.beside_energy.factor(1.0) if trace.ahead else 1.0)


def _keep_to(memory: Memory, path: Path, trace: RoundTrace, offers: tuple[Offer, ...], round_ms: float) -> None:
    choice = (trace.drafter if trace.planned else "", trace.planned)
    if choice == path.last or DETOUR not in trace.reason:
        whole = any(offer.drafter == choice[0] and offer.tokens is not None and offer.tokens <= choice[1] for offer in offers)
        path.incumbent, path.whole = choice, whole
    if DETOUR not in trace.reason:
        path.ahead = trace.ahead > 0
    memory.ms_since_detour = memory.ms_since_detour + round_ms if choice == path.incumbent else 0.0
    path.last = choice
