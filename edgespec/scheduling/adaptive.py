"""Decide every round, from measured costs and measured acceptance, how much to guess, and whether to guess at all.

The plan is the draft length with the least expected cost per token, plain decoding included:

    cost(γ) = [(1−h)(c_1 + miss) + h(c_{n+1} + d_n)] / [(1−h) + h(1 + Σ_{k<=γ} r_k Π_{i<=k} α_i)],  n = Σ_{k<=γ} r_k

with c_m the target's time for m rows, d_n the drafter's for n nodes, h the chance that the drafter offers anything,
r_k the chance that an offer has k nodes, α_i acceptance by depth: all learnt from the history, none assumed for long.
Three habits keep it honest. It stays with what it does unless another length is clearly better. It looks beside its path only
when the expected loss is paid for by the time since it last did (3 %). A drafter that does not pay is parked and looked at
again at growing intervals, bounded so that a recovery is noticed.

Not modelled: tree drafts count as chains of their nodes; drafting ahead shows only as a smaller d_n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.acceptance import Acceptance
from edgespec.scheduling.costs import DraftCosts, RowCosts
from edgespec.scheduling.folding import HistoryFold
from edgespec.scheduling.limits import draft_limit

HOT = frozenset({"serious", "critical"})
ASSUMED_ROW = 0.15  # v(m) = 1 + .15 (m−1) until measured: between a GPU and a CPU
ASSUMED_DRAFT = 0.1  # a draft step costs this share of a target step until measured
MARGIN = 0.02  # gain below which the plan does not change
EXPLORE_SHARE = 0.03  # of the time since the last detour may be lost on the next
STALE_SAMPLES, STALE_AT_MOST = 40, 300  # a width not seen for so long, per time it was seen, may be looked at again
PLAIN_CHECK = 150  # samples after which one row is timed again whatever it costs: every comparison rests on it
FIRST_INTERVAL, LAST_INTERVAL = 4, 30  # plain rounds between looks at a parked drafter
SECOND_OPINION = 8  # plain rounds after a look that went neither well nor badly
DETOUR = "looking"  # in a plan's reason: not the path
PARKED_SHARE = 0.05  # what such looks may cost at the longest interval, so that a recovery is noticed
LOST_SHARE = 0.07  # no look while more than this has been lost against plain decoding
HOPELESS_INTERVAL = 60  # the same, for a drafter that could not win even if nearly all were accepted
HOPED_ACCEPTANCE = 0.95
LOOK_WEIGHT = 1.5  # tested tokens that old beliefs weigh when a parked drafter is looked at
LOOK_SIGMAS = 2.0
LONGEST_LOOK = 4
LONG_LOOK_SHARE = 0.3  # of the budget for looks; one node says most of what there is to know
PROMISING = 0.7
SURE_TOKENS = 2.5  # expected tokens per round that make it needless to measure plain decoding first
ENERGY_WEIGHT: Mapping[str, float] = {"fast": 0.0, "balanced": 0.3, "saver": 0.8}


@dataclass(slots=True)
class _Drafter:
    """What the history says of one drafter."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    cool: DraftCosts = field(default_factory=DraftCosts)
    hot: DraftCosts | None = None
    asked: float = 0.0  # rounds it was asked, discounted
    offered: float = 0.0  # those in which it offered nodes
    miss_ms: float = 0.0
    long_enough: list[float] = field(default_factory=list[float])  # offers of at least k+1 nodes where so many were allowed
    allowed: list[float] = field(default_factory=list[float])
    parked: int = 0  # plain rounds since it last offered anything
    looks: int = 0  # fruitless looks since it last ran freely
    streak: int = 0  # offers since it was last parked
    run_kept: int = 0  # tokens accepted since it was last parked
    run_refused: int = 0  # and refused

    def observe(self, trace: RoundTrace) -> None:
        self.asked = 0.95 * self.asked + 1.0
        self.offered = 0.95 * self.offered + (trace.drafted > 0)
        if trace.drafted == 0:
            self.miss_ms += 0.2 * (trace.draft_ms - self.miss_ms)
            return
        if self.parked >= FIRST_INTERVAL:
            self.acceptance.forget(LOOK_WEIGHT)
            self.looks, self.streak = self.looks + 1, 0
            self.run_kept = self.run_refused = 0
        self.parked = 0
        self.streak += 1
        self.run_kept += trace.kept
        self.run_refused += trace.kept < trace.drafted
        if self.streak > FIRST_INTERVAL:
            self.looks = 0
        if trace.thermal in HOT:
            self.hot = self.hot or DraftCosts()
            self.hot.observe(trace.drafted, trace.draft_ms)
        else:
            self.cool.observe(trace.drafted, trace.draft_ms)
        self.acceptance.observe(trace.drafted, trace.kept)
        while len(self.allowed) < trace.planned:
            self.allowed.append(0.0)
            self.long_enough.append(0.0)
        for k in range(trace.planned):
            self.allowed[k] = 0.95 * self.allowed[k] + 1.0
            self.long_enough[k] = 0.95 * self.long_enough[k] + (trace.drafted > k)

    def costs(self, hot: bool) -> DraftCosts:
        return self.cool if not hot or self.hot is None else self.hot

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
class _Memory:
    """The folded history."""

    cool: RowCosts = field(default_factory=RowCosts)
    hot: RowCosts | None = None  # hot rounds have a book of their own: they never overwrite what the cool machine can do
    energy: RowCosts = field(default_factory=RowCosts)  # mJ per round by rows
    watts: float | None = None  # mJ per ms, averaged
    drafters: dict[str, _Drafter] = field(default_factory=dict[str, _Drafter])
    thermal: str | None = None
    last: tuple[str, int] = ("", -1)  # (drafter, planned) of the last round
    incumbent: tuple[str, int] = ("", -1)  # the path, as opposed to a detour (which becomes the path if planned again)
    ms_since_detour: float = 0.0
    elapsed_ms: float = 0.0
    lost_ms: float = 0.0  # against plain decoding; what was won before does not pay for it

    def drafter(self, name: str) -> _Drafter:
        return self.drafters.setdefault(name, _Drafter())

    def book(self, hot: bool) -> RowCosts:
        return self.cool if not hot or self.hot is None else self.hot


def _learn(memory: _Memory, trace: RoundTrace) -> _Memory:
    target_ms = trace.verify_ms + trace.judge_ms + trace.commit_ms
    memory.thermal = trace.thermal
    if trace.thermal in HOT:
        memory.hot = memory.hot or memory.cool.copy()
        memory.hot.observe(trace.rows, target_ms)
    else:
        memory.cool.observe(trace.rows, target_ms)
    round_ms = target_ms + trace.draft_ms
    memory.elapsed_ms += round_ms
    plain_ms = memory.book(trace.thermal in HOT).ms(1)
    if trace.planned > 0 and plain_ms is not None:
        memory.lost_ms = max(0.0, memory.lost_ms + round_ms - trace.emitted * plain_ms)
    if trace.energy_mj is not None and round_ms > 0:
        memory.energy.observe(trace.rows, trace.energy_mj)
        watts = trace.energy_mj / round_ms
        memory.watts = watts if memory.watts is None else memory.watts + 0.05 * (watts - memory.watts)
    for name, drafter in memory.drafters.items():
        if trace.planned == 0 or name != trace.drafter:
            drafter.rest()
    if trace.planned > 0:
        memory.drafter(trace.drafter).observe(trace)
    choice = (trace.drafter if trace.planned else "", trace.planned)
    if choice == memory.last or DETOUR not in trace.reason:
        memory.incumbent = choice
    memory.ms_since_detour = memory.ms_since_detour + round_ms if choice == memory.incumbent else 0.0
    memory.last = choice
    return memory


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Expected round by draft length γ = 0..limit: `ms[γ]`, `tokens[γ]`, and the `price` [cost per token] to choose by."""

    ms: list[float]
    tokens: list[float]
    price: list[float]

    def best(self) -> int:
        return self.price.index(min(self.price))


class AdaptivePolicy:
    """The measured-cost policy; see the module. `drafters` names those it may choose among, default the session's own."""

    def __init__(self, drafters: Sequence[str] = ()) -> None:
        self._drafters = tuple(drafters)
        self._fold = HistoryFold(_Memory, _learn)

    @property
    def name(self) -> str:
        return "adaptive"

    @property
    def wants_entropy(self) -> bool:
        return False

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        limit = draft_limit(state, knobs)
        if limit == 0:
            return Plan(0, reason="no room for a draft")
        memory = self._fold(history)
        thermal = state.power.thermal if state.power is not None else memory.thermal
        hot = thermal in HOT
        book = memory.book(hot)
        rated = _rated(profile)
        costs = book.curve(_shape(rated, state.context_len, limit + 1))
        names = self._drafters or (state.drafter,)
        chooser = _Chooser(memory, book, hot, costs, knobs, limit, frozenset(rated.forward_ms) if rated else frozenset())
        name, gamma, reason = chooser.choose(names)
        return Plan(gamma, reason=reason, drafter=name if gamma and name != state.drafter else "")


def _rated(profile: DeviceProfile) -> UnitProfile | None:
    """The unit whose widths were measured before, if there is one."""
    return next((unit for unit in profile.units.values() if len(unit.forward_ms) > 1 and 1 in unit.forward_ms), None)


def _shape(measured: UnitProfile | None, context_len: int, rows: int) -> Sequence[float]:
    """Assumed v(1..rows): the measured widths at the nearest context, or a straight line."""
    if measured is None:
        return _line(rows)
    book = RowCosts()
    for m, ms in _at_context(measured, context_len).items():
        book.observe(m, ms)
    curve = book.curve(_line(rows))
    return [ms / curve[0] for ms in curve]


@lru_cache(maxsize=64)
def _line(rows: int) -> tuple[float, ...]:
    return tuple(1.0 + ASSUMED_ROW * m for m in range(rows))


def _at_context(unit: UnitProfile, context_len: int) -> dict[int, float]:
    """ms by rows, each at the measured context nearest to `context_len`."""
    return {
        rows: by_context[min(by_context, key=lambda context: abs(context - context_len))]
        for rows, by_context in unit.forward_ms.items()
        if by_context
    }


@dataclass(slots=True)
class _Chooser:
    """One decision over one folded history."""

    memory: _Memory
    book: RowCosts
    hot: bool
    costs: list[float]  # ms for 1..limit+1 rows
    knobs: Knobs
    limit: int
    rated: frozenset[int]  # rows whose cost the profile knows

    def choose(self, names: Sequence[str]) -> tuple[str, int, str]:
        """(drafter, draft length, reason)."""
        outlooks = {name: self._outlook(name) for name in names}
        name = min(names, key=lambda name: min(outlooks[name].price))
        gamma = outlooks[name].best()
        if 1 not in self.rated and not self.book.samples(1) and self._plain_is_due(outlooks[name], gamma):
            return "", 0, "measuring one row"
        enough = self._enough(outlooks[name])
        if enough is not None and enough <= gamma:
            return name, enough, f"{enough} drafted nodes keep the pace asked for"
        name, gamma = self._stay_if_close(outlooks, name, gamma)
        if gamma == 0:
            return self._look_at_parked(outlooks) or ("", 0, self._plain_reason(outlooks))
        detour = self._detour(outlooks[name], gamma)
        if detour is not None:
            return name, detour, f"{DETOUR} at {detour} beside {gamma}"
        outlook = outlooks[name]
        expected = outlook.ms[gamma] / outlook.tokens[gamma]
        if not self.book.seen:  # assumed costs have a shape but no unit
            return name, gamma, f"a token assumed to take {expected / self.costs[0]:.2g} of plain decoding's time"
        return name, gamma, f"{expected:.3g} ms/token expected, plain {self.costs[0]:.3g}"

    def _outlook(self, name: str, *, alphas: Sequence[float] | None = None) -> _Outlook:
        drafter = self.memory.drafters.get(name) or _Drafter()
        alphas = drafter.acceptance.alphas(self.limit) if alphas is None else alphas
        costs, offers = self.costs, drafter.offers
        draft = drafter.costs(self.hot)
        start_ms, node_ms = draft.line if draft.known else (0.0, ASSUMED_DRAFT * costs[0])
        missed = (1.0 - offers) * (costs[0] + drafter.miss_ms)
        ms, tokens = [costs[0]], [1.0]
        nodes, path, gain = 0.0, 1.0, 0.0
        for reach, alpha in zip(drafter.reaches(self.limit), alphas, strict=True):
            nodes += reach
            path *= alpha
            gain += reach * path
            whole = int(nodes)  # rows lie between two widths when offers are shorter than allowed
            row_ms = costs[whole]
            if nodes > whole:
                row_ms += (nodes - whole) * (costs[whole + 1] - row_ms)
            ms.append(missed + offers * (row_ms + start_ms + node_ms * nodes))
            tokens.append(1.0 + offers * gain)
        return _Outlook(ms, tokens, self._price(ms, tokens))

    def _price(self, ms: list[float], tokens: list[float]) -> list[float]:
        """Cost per token: time, with energy mixed in as the knobs say where a meter exists."""
        weight = ENERGY_WEIGHT[self.knobs.energy]
        if weight == 0.0 or self.memory.watts is None:
            return [a / b for a, b in zip(ms, tokens, strict=True)]
        energy = self.memory.energy.curve(_line(self.limit + 1))  # mJ; in ms at the average watts
        watts = self.memory.watts
        return [((1.0 - weight) * a + weight * e / watts) / b for a, e, b in zip(ms, energy, tokens, strict=True)]

    def _plain_is_due(self, outlook: _Outlook, gamma: int) -> bool:
        """One row was never timed: needed to judge a doubtful draft, and after a while in any case."""
        started = self.memory.last[1] >= 0
        return started and (outlook.tokens[gamma] < SURE_TOKENS or self.memory.ms_since_detour * EXPLORE_SHARE > self.costs[0])

    def _enough(self, outlook: _Outlook) -> int | None:
        """The shortest draft that keeps the user's pace, if there is a pace and it can be kept."""
        pace = self.knobs.target_ms_per_token
        if pace is None:
            return None
        return next((g for g in range(self.limit + 1) if outlook.ms[g] / outlook.tokens[g] <= pace), None)

    def _stay_if_close(self, outlooks: Mapping[str, _Outlook], name: str, gamma: int) -> tuple[str, int]:
        held_name, held = self.memory.incumbent
        held_name = held_name or name
        if not 0 <= held <= self.limit or held_name not in outlooks:
            return name, gamma
        close = outlooks[held_name].price[held] <= outlooks[name].price[gamma] * (1.0 + MARGIN)
        return (held_name, held) if close else (name, gamma)

    def _loss(self, outlook: _Outlook, gamma: int, price: float) -> float:
        """Expected ms lost in one round of this length instead of rounds at `price` per token."""
        return (outlook.price[gamma] - price) * outlook.tokens[gamma]

    def _detour(self, outlook: _Outlook, gamma: int) -> int | None:
        """A neighbouring length whose cost is unknown or old, if the time since the last detour pays for it."""
        if self.book.samples(1) and (self.book.outdated(1) or self.book.age(1) > PLAIN_CHECK << self.book.confirmed(1)):
            return 0
        budget = EXPLORE_SHARE * self.memory.ms_since_detour
        price = outlook.price[gamma]
        for other in (gamma + 1, gamma + 2, gamma + 4, gamma - 1, 0):
            if not 0 <= other <= self.limit or other == gamma:
                continue
            if self._unknown(other + 1) and self._loss(outlook, other, price) <= budget:
                return other
        return None

    def _unknown(self, rows: int) -> bool:
        """Never measured, or so long ago, for how often it was seen and confirmed, that it is worth a look."""
        samples, age = self.book.samples(rows), self.book.age(rows)
        if samples < 2:
            if rows not in self.rated:
                return True
            samples, age = 2, min(age, self.book.seen)
        return age > min(STALE_SAMPLES * samples, STALE_AT_MOST) << self.book.confirmed(rows)

    def _look_at_parked(self, outlooks: Mapping[str, _Outlook]) -> tuple[str, int, str] | None:
        for name in outlooks:
            drafter = self.memory.drafters.get(name)
            gamma = self._follow_up(name, drafter) if drafter is not None and drafter.parked == 0 else 0
            if gamma:
                return name, gamma, f"the look at a parked drafter went well: {DETOUR} again"
            gamma = self._look(name, drafter or _Drafter(parked=FIRST_INTERVAL), outlooks[name])
            if gamma:
                return name, gamma, f"{DETOUR} at a parked drafter"
        return None

    def _follow_up(self, name: str, drafter: _Drafter) -> int:
        """After a good look: again and longer, while an optimist could still believe in it."""
        if not drafter.promising:
            return 0
        hopes = [min(alpha, HOPED_ACCEPTANCE) for alpha in drafter.acceptance.alphas(self.limit, sigmas=LOOK_SIGMAS)]
        outlook = self._outlook(name, alphas=hopes)
        gamma = outlook.best()
        return min(gamma, drafter.run_kept + 1) if outlook.price[gamma] < self.costs[0] * (1.0 - MARGIN) else 0

    def _look(self, name: str, drafter: _Drafter, outlook: _Outlook) -> int:
        """Nodes to look at a parked drafter with, 0 if it is not due or not paid for."""
        hoped = self._outlook(name, alphas=[HOPED_ACCEPTANCE] * self.limit)
        hopeless = min(hoped.price) >= outlook.price[0] * (1.0 - MARGIN)
        undecided = drafter.undecided and not hopeless
        interval = HOPELESS_INTERVAL if hopeless else min(FIRST_INTERVAL << drafter.looks, LAST_INTERVAL)
        if drafter.parked < (min(interval, SECOND_OPINION) if undecided else interval):
            return 0
        memory = self.memory
        least = self._loss(outlook, 1, outlook.price[0])
        if memory.lost_ms + least > LOST_SHARE * memory.elapsed_ms:
            return 0
        budget = EXPLORE_SHARE * memory.ms_since_detour
        for gamma in range(min(LONGEST_LOOK, self.limit), 1, -1):
            if self._loss(outlook, gamma, outlook.price[0]) <= LONG_LOOK_SHARE * budget:
                return gamma
        if least <= budget:
            return 1
        overdue = drafter.parked >= LAST_INTERVAL and least <= PARKED_SHARE * memory.ms_since_detour
        return 1 if overdue or undecided else 0

    def _plain_reason(self, outlooks: Mapping[str, _Outlook]) -> str:
        best = min(min(outlook.price[1:], default=outlook.price[0]) for outlook in outlooks.values())
        return f"parked: drafting would cost {best:.3g} per token, plain {self.costs[0]:.3g}"
