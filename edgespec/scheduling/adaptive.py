"""Decide every round, from measured costs and measured acceptance, who guesses and how much, and whether anybody does.

A round of γ drafted tokens is expected to cost

    cost(γ) = (1−h)(c_1 + miss) + h(c_{n+1} + d_n),  n = Σ_{k<=γ} r_k,  and brings  tokens(γ) = 1 + h Σ_{k<=γ} r_k Π_{i<=k} α_i

with c_m the target's time for m rows, d_n the drafter's for n nodes, h the chance that the drafter offers anything,
r_k the chance that an offer has k nodes, α_i acceptance by depth at the drafter's present confidence: all learnt from the history,
none assumed for long. The plan is the γ with the least cost(γ) − rate · tokens(γ), where rate is what the tokens that come next
usually cost: a token drafted now saves that. Where all rounds are alike this is the least cost(γ) / tokens(γ) (Dinkelbach 1967).
γ = 0 is plain decoding and takes part.

Every γ of a drafter that can draft ahead is priced both ways (`costs.ahead_ms`), if a profile says how much that slows the target;
the outcome foreseen comes true with Π_{i<=γ+1} α_i.

Three habits keep it honest. It stays with what it does unless another length is clearly better. It looks beside its path only
when the expected loss is paid for by the time since it last did (3 %). A drafter that does not pay is parked and looked at
again at growing intervals, bounded so that a recovery is noticed; one whose guesses are known without asking it need not be.

Where making a plan takes too large a share of a round, it stands for the next few of its kind.

Not modelled: tree drafts count as chains of their nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.drafter import Offer
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.costs import RowCosts, ahead_ms
from edgespec.scheduling.folding import HistoryFold
from edgespec.scheduling.limits import draft_limit
from edgespec.scheduling.memory import DETOUR, FIRST_INTERVAL, HOT, LAST_INTERVAL, Arm, Choice, Memory, Setting, learn, setting_of

ASSUMED_ROW = 0.15  # v(m) = 1 + .15 (m−1) until measured: between a GPU and a CPU
ESTIMATE_ROUNDS = 8  # of so many an estimate says what rows cost; then what was measured over the straight line says it better
ASSUMED_DRAFT = 0.1  # a draft step costs this share of a target step until measured
OPTIMISM = 0.2  # standard deviations of hope for the rest of an offer
WHOLE_MARGIN = 0.05  # loss below which an offer is taken whole
MARGIN = 0.02  # gain below which the plan does not change
EXPLORE_SHARE = 0.03  # of the time since the last detour may be lost on the next
STALE_SAMPLES, STALE_AT_MOST = 40, 300  # a width not seen for so long, per time it was seen, may be looked at again
PARKED_STALE = 40  # the same while nothing is drafted
PLAIN_CHECK = 150  # samples after which one row is timed again whatever it costs: every comparison rests on it
SECOND_OPINION = 8  # plain rounds after a look that went neither well nor badly
PARKED_SHARE = 0.05  # what such looks may cost at the longest interval, so that a recovery is noticed
LOST_SHARE = 0.07  # no look while more than this has been lost against plain decoding
ENOUGH_LOOKS = 40  # in a row; what they could not show, more of them will not
HOPELESS_INTERVAL = 60  # rounds between looks at a drafter that could not win even if nearly all were accepted
HOPED_ACCEPTANCE = 0.95
LOOK_SIGMAS = 2.0
LONGEST_LOOK = 4
LONG_LOOK_SHARE = 0.3  # of the budget for looks; one node says most of what there is to know
SURE_TOKENS = 2.5  # expected tokens per round that make it needless to measure plain decoding first
UNDISTURBED_EVERY = 16  # passes: fewer than `costs.STALE`, so that a width's samples are averaged and lone spikes cut
FIRST_TOKEN = 0.3  # of the way from another setting's average to plain decoding's cost lies its first token; see docs/log.md
PLANNING_SHARE = 0.01  # of a round's time; a plan that took more …
STANDS = 4  # … stands for so many rounds
ENERGY_WEIGHT: Mapping[str, float] = {"fast": 0.0, "balanced": 0.3, "saver": 0.8}


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Expected round by draft length γ = 0..: `ms`, `tokens`, `cost` (ms, with energy mixed in as the knobs say).

    `ahead` says where they are those of drafting ahead, because it is cheaper; `alone` is the cost without. `stated`: the offer says
    how long it is, and the last γ is all of it.
    """

    ms: list[float]
    tokens: list[float]
    cost: list[float]
    alone: list[float]
    ahead: list[bool]
    stated: bool

    @property
    def most(self) -> int:
        """The longest draft."""
        return len(self.cost) - 1

    def cheapest(self) -> tuple[float, int]:
        """The least cost per token, and the draft length that has it."""
        best, at = self.cost[0], 0
        for gamma in range(1, len(self.cost)):
            if self.cost[gamma] < best * self.tokens[gamma]:
                best, at = self.cost[gamma] / self.tokens[gamma], gamma
        return best, at


class _Round(NamedTuple):
    """One that offers something: the target's ms, the drafter's, and the chance that drafting ahead foresees how it ends."""

    row_ms: float
    draft_ms: float
    foreseen: float


class AdaptivePolicy:
    """The measured-cost policy; see the module."""

    def __init__(self) -> None:
        self._fold = HistoryFold(Memory, learn)
        self._rated: _Rated | None = None  # of the last profile: only a memo

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
        offers = tuple(offer for offer in state.offers or (Offer(state.drafter),) if offer.tokens != 0)
        if not offers:
            return Plan(0, reason="nothing to guess from")
        limit = min(limit, max(limit if offer.tokens is None else offer.tokens for offer in offers))
        if (standing := _standing(history, state, offers, limit)) is not None:
            return standing
        memory = self._fold(history)
        hot = (state.power.thermal if state.power is not None else memory.thermal) in HOT
        book = memory.book(hot)
        if self._rated is None or self._rated.profile is not profile:
            self._rated = _Rated(profile)
        costs = book.curve(self._rated.shape(state.context_len, knobs.max_draft_tokens + 1, book.seen), limit + 1)
        chooser = _Chooser(memory, book, hot, costs, knobs, limit, self._rated.rows, offers, profile.overlap_penalty, setting_of(offers))
        name, gamma, ahead, reason = chooser.choose()
        return Plan(gamma, reason=reason, drafter=name if gamma and name != state.drafter else "", ahead=int(ahead))


def _standing(history: Sequence[RoundTrace], state: RoundState, offers: tuple[Offer, ...], limit: int) -> Plan | None:
    """The plan of a round like this one a moment ago, if to make it took too large a share of that round.

    So a model whose rounds are short is not slowed by thinking about them. What the rounds in between said is learnt with the next
    plan that is made anew.
    """
    setting: Setting | None = None
    for trace in history[-1 : -1 - STANDS : -1]:
        if trace.plan_ms <= PLANNING_SHARE * trace.round_ms or DETOUR in trace.reason:
            continue
        setting = setting or setting_of(offers)
        if setting_of(trace.offers) != setting or trace.ahead or (state.power is not None and state.power.thermal != trace.thermal):
            continue
        if not trace.planned:
            return Plan(0, reason=trace.reason)
        offered = next((offer.tokens for offer in trace.offers if offer.drafter == trace.drafter), None)
        whole = offered is not None and offered <= trace.planned
        drafter = trace.drafter if trace.drafter != state.drafter else ""
        return Plan(limit if whole else min(limit, trace.planned), reason=trace.reason, drafter=drafter)
    return None


@lru_cache(maxsize=64)
def _line(rows: int) -> tuple[float, ...]:
    return tuple(1.0 + ASSUMED_ROW * m for m in range(rows))


class _Rated:
    """What a profile says of the cost of rows: the unit with several widths, if there is one. Of estimates nothing is known."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._unit = next((unit for unit in profile.units.values() if len(unit.forward_ms) > 1 and 1 in unit.forward_ms), None)
        self.rows = frozenset(self._unit.forward_ms) if self._unit and not profile.estimated else frozenset[int]()
        self._contexts = sorted({context for by_context in self._unit.forward_ms.values() for context in by_context}) if self._unit else []
        self._shapes: dict[tuple[int, int], Sequence[float]] = {}

    def shape(self, context_len: int, rows: int, seen: int) -> Sequence[float]:
        """Assumed v(1..rows): the profile's widths at the nearest context, or a straight line.

        An estimate gives way to the line as rounds are `seen`: a wrong one may say that nothing is worth measuring.
        """
        if self._unit is None or not self._contexts or (self.profile.estimated and seen >= ESTIMATE_ROUNDS):
            return _line(rows)
        near = min(self._contexts, key=lambda context: abs(context - context_len)), rows
        if near not in self._shapes:
            self._shapes[near] = _profile_shape(self._unit, *near)
        return self._shapes[near]


def _profile_shape(unit: UnitProfile, context_len: int, rows: int) -> Sequence[float]:
    book = RowCosts()
    for m, by_context in unit.forward_ms.items():
        if by_context:
            book.observe(m, by_context[min(by_context, key=lambda context: abs(context - context_len))])
    curve = book.curve(_line(rows))
    return [ms / curve[0] for ms in curve]


@dataclass(slots=True)
class _Chooser:
    """One decision over one folded history."""

    memory: Memory
    book: RowCosts
    hot: bool
    costs: list[float]  # ms for 1..limit+1 rows
    knobs: Knobs
    limit: int
    rated: frozenset[int]  # rows whose cost the profile knows
    offers: tuple[Offer, ...]  # that have something to offer
    overlap: float | None  # factor on the target's time that the profile gives while a drafter works beside it
    setting: Setting
    rate: float = 0.0  # what a token that comes next usually costs

    def choose(self) -> tuple[str, int, bool, str]:
        """(drafter, draft length, whether to draft ahead, reason)."""
        outlooks = {offer.drafter: self._outlook(offer) for offer in self.offers}
        self.rate = self._going_rate(outlooks)
        name, gamma = min(
            ((name, self._best(outlook)) for name, outlook in outlooks.items()), key=lambda c: self._value(outlooks[c[0]], c[1])
        )
        if 1 not in self.rated and not self.book.samples(1) and self._plain_is_due(outlooks[name], gamma):
            return "", 0, False, "measuring one row"
        enough = self._enough(outlooks[name])
        if enough is not None and enough <= gamma:
            return name, enough, *self._beside(outlooks[name], enough, f"{enough} drafted nodes keep the pace asked for")
        gamma = self._whole_if_close(outlooks[name], gamma)
        name, gamma = self._stay_if_close(outlooks, name, gamma)
        if gamma == 0:
            name, gamma, reason = self._look_at_parked(outlooks) or ("", 0, self._plain_reason(outlooks))
            return name, gamma, False, reason
        detour = self._detour(outlooks[name], gamma)
        if detour is not None:
            return name, detour, False, f"{DETOUR} at {detour} beside {gamma}"
        outlook = outlooks[name]
        expected = outlook.ms[gamma] / outlook.tokens[gamma]
        if not self.book.seen:  # assumed costs have a shape but no unit
            return name, gamma, False, f"a token assumed to take {expected / self.costs[0]:.2g} of plain decoding's time"
        return name, gamma, *self._beside(outlook, gamma, f"{expected:.3g} ms/token expected, plain {self.costs[0]:.3g}")

    def _beside(self, outlook: _Outlook, gamma: int, reason: str) -> tuple[bool, str]:
        """Whether to draft ahead, and the reason in full. Now and then the target is timed undisturbed: all is compared with that."""
        if not outlook.ahead[gamma]:
            return False, reason
        if self.book.samples(gamma + 1) < 2 or self.book.age(gamma + 1) > UNDISTURBED_EVERY:
            return False, f"{reason}; {DETOUR} at the target undisturbed"
        return True, f"{reason}, drafting ahead"

    def _outlook(self, offer: Offer, *, hopes: Sequence[float] | None = None) -> _Outlook:
        """As learnt, or with the acceptance that is hoped for and costs to match."""
        arm = self.memory.arm(offer)
        stated = offer.tokens is not None
        depth = self.limit if offer.tokens is None else min(self.limit, offer.tokens)
        reaches = [1.0] * depth if stated else arm.reaches(depth)
        offers = 1.0 if stated else arm.offers
        costs, draft = self.costs if hopes is None else self._hoped_costs(), self.memory.draft_costs(offer.drafter, self.hot)
        start_ms, node_ms = draft.line if draft.known else (0.0, ASSUMED_DRAFT * costs[0])
        missed_ms = (1.0 - offers) * (costs[0] + arm.miss_ms)
        alphas = self._acceptance(offer, arm, depth + 1) if hopes is None else [*hopes[:depth], hopes[depth - 1]]
        ms, tokens, rounds = [costs[0]], [1.0], [_Round(costs[0], 0.0, 1.0)]
        nodes, path, gain = 0.0, 1.0, 0.0
        for reach, alpha, bonus in zip(reaches, alphas, alphas[1:], strict=False):
            nodes += reach
            path *= alpha
            gain += reach * path
            whole = int(nodes)  # rows lie between two widths when offers are shorter than allowed
            row_ms = costs[whole]
            if nodes > whole:
                row_ms += (nodes - whole) * (costs[whole + 1] - row_ms)
            rounds.append(_Round(row_ms, start_ms + node_ms * nodes, path * bonus))
            ms.append(missed_ms + offers * (row_ms + rounds[-1].draft_ms))
            tokens.append(1.0 + offers * gain)
        alone = self._mixed(ms)
        if not offer.ahead or self.overlap is None:
            return _Outlook(ms, tokens, alone, alone, [False] * len(ms), stated)
        beside = [missed_ms + offers * ahead_ms(*r[:2], node_ms, factor=self._factor, foreseen=r.foreseen) for r in rounds]
        outlook = _Outlook(ms, tokens, alone, alone, [False] * len(ms), stated)
        return self._with_ahead(outlook, beside, [r.foreseen for r in rounds])

    def _acceptance(self, offer: Offer, arm: Arm, depth: int) -> list[float]:
        """As learnt; of an offer of stated length, what follows the first token with some hope, or it would never be tested."""
        if offer.tokens is None:
            return arm.acceptance.alphas(depth)
        return [*arm.acceptance.alphas(1), *arm.acceptance.alphas(depth, sigmas=OPTIMISM)[1:]]

    def _with_ahead(self, alone: _Outlook, beside_ms: list[float], foreseen: list[float]) -> _Outlook:
        """By draft length whichever is cheaper: drafting in turn with the target, or beside it."""
        cost = self._mixed(beside_ms, self._energy_factors(alone.ms, foreseen))
        held = self.memory.paths.get(self.setting)
        margin = 1.0 + MARGIN if held is not None and held.ahead else 1.0 - MARGIN
        ahead = [gamma > 0 and cost[gamma] < margin * alone.cost[gamma] for gamma in range(len(cost))]
        return replace(alone, ms=_where(ahead, beside_ms, alone.ms), cost=_where(ahead, cost, alone.cost), ahead=ahead)

    def _hoped_costs(self) -> list[float]:
        """Two rows may cost far more than one, and many no more than two: a slope that nobody measured must not spoil every hope."""
        wider = any(m in self.rated or self.book.samples(m) for m in range(3, len(self.costs) + 1))
        if wider or not self.book.samples(2):
            return self.costs
        return [self.costs[0], *([self.costs[1]] * (len(self.costs) - 1))]

    def _energy_factors(self, ms: Sequence[float], foreseen: Sequence[float]) -> list[float]:
        """On the energy of a round by draft length while drafting ahead.

        Until it is measured, energy is taken to go with the time of both models, and what was not foreseen to be drafted twice.
        """
        wasted = ((1.0 - hit) * max(0.0, 1.0 - row / both) for hit, row, both in zip(foreseen, self.costs, ms, strict=False))
        return [self.memory.beside_energy.factor(1.0 + share) for share in wasted]

    @property
    def _factor(self) -> float:
        """On the target's time while a drafter works beside it."""
        return max(1.0, self.memory.beside.factor(self.overlap or 1.0))

    def _mixed(self, ms: list[float], energy_factors: Sequence[float] | None = None) -> list[float]:
        """Time, with energy mixed in as the knobs say where a meter exists: mJ in ms at the average watts."""
        weight = ENERGY_WEIGHT[self.knobs.energy]
        if weight == 0.0 or self.memory.watts is None:
            return ms
        energy, watts = self.memory.energy.curve(_line(self.limit + 1)), self.memory.watts
        factors = energy_factors or [1.0] * len(ms)
        return [(1.0 - weight) * a + weight * e * f / watts for a, e, f in zip(ms, energy, factors, strict=False)]

    def _going_rate(self, outlooks: Mapping[str, _Outlook]) -> float:
        """What a token accepted now saves: what tokens cost here at their best, and in the settings that usually follow.

        Never more than plain decoding's. Where there are only guesses copied from the text, the first in another setting costs more
        than the average there: whether the match goes on is found out with it.
        """
        (price, at), own = min(((outlook.cheapest(), outlook) for outlook in outlooks.values()), key=lambda pair: pair[0])
        path = self.memory.paths.get(self.setting)
        if path is None or not path.next:
            return price
        plain, first = own.cost[0], FIRST_TOKEN if all(outlook.stated for outlook in outlooks.values()) else 0.0
        weight = ENERGY_WEIGHT[self.knobs.energy] if self.memory.watts is not None else 0.0
        cost = tokens = 0.0
        for follower, share in path.next.items():
            if follower == self.setting:
                cost, tokens = cost + share * own.cost[at], tokens + share * own.tokens[at]
            else:
                then = self.memory.paths[follower]
                usual = then.mixed(weight)
                cost += share * plain * (usual + first * max(0.0, then.tokens - usual))
                tokens += share * then.tokens
        return min(plain, cost / tokens)

    def _value(self, outlook: _Outlook, gamma: int) -> float:
        """What a round of this length costs beyond its tokens' worth; the least is best."""
        return outlook.cost[gamma] - self.rate * outlook.tokens[gamma]

    def _best(self, outlook: _Outlook) -> int:
        return min(range(len(outlook.cost)), key=lambda gamma: self._value(outlook, gamma))

    def _plain_is_due(self, outlook: _Outlook, gamma: int) -> bool:
        """One row was never timed: needed to judge a doubtful draft, and after a while in any case."""
        doubtful = outlook.tokens[gamma] < SURE_TOKENS or self.memory.ms_since_detour * EXPLORE_SHARE > self.costs[0]
        return self.book.seen > 0 and doubtful

    def _enough(self, outlook: _Outlook) -> int | None:
        """The shortest draft that keeps the user's pace, if there is a pace and it can be kept."""
        pace = self.knobs.target_ms_per_token
        if pace is None:
            return None
        return next((g for g in range(len(outlook.ms)) if outlook.ms[g] / outlook.tokens[g] <= pace), None)

    def _whole_if_close(self, outlook: _Outlook, gamma: int) -> int:
        """All of a stated offer rather than nearly all: the fewer different widths are used, the better each is known."""
        if not gamma or not outlook.stated:
            return gamma
        worth = self.rate * outlook.tokens[outlook.most]
        close = self._value(outlook, outlook.most) <= self._value(outlook, gamma) + WHOLE_MARGIN * worth
        return outlook.most if close else gamma

    def _stay_if_close(self, outlooks: Mapping[str, _Outlook], name: str, gamma: int) -> Choice:
        path = self.memory.paths.get(self.setting)
        held_name = path.incumbent[0] or name if path is not None else name
        if path is None or path.incumbent[1] < 0 or held_name not in outlooks:  # a drafter within a drafter is none that can be asked
            return name, gamma
        most = outlooks[held_name].most
        held = most if path.whole and path.incumbent[1] else min(path.incumbent[1], most)
        worth = self.rate * outlooks[held_name].tokens[held]
        close = self._value(outlooks[held_name], held) <= self._value(outlooks[name], gamma) + MARGIN * worth
        return (held_name, held) if close else (name, gamma)

    def _loss(self, outlook: _Outlook, gamma: int, path: int) -> float:
        """Expected ms lost in one round of this length, nothing drafted ahead, instead of the path's."""
        return outlook.alone[gamma] - self.rate * outlook.tokens[gamma] - self._value(outlook, path)

    def _detour(self, outlook: _Outlook, gamma: int) -> int | None:
        """A neighbouring length whose cost is unknown or old, if the time since the last detour pays for it."""
        if self.book.samples(1) and (self.book.outdated(1) or self.book.age(1) > PLAIN_CHECK << self.book.confirmed(1)):
            return 0
        budget = EXPLORE_SHARE * self.memory.ms_since_detour
        whole = outlook.stated and gamma == outlook.most
        for other in (gamma + 1, gamma + 2, gamma + 4, *(() if whole else (gamma - 1,)), 0):
            if not 0 <= other <= outlook.most:
                continue
            unknown = self._unknown(other + 1, parked=gamma == 0) and not self._enclosed(other + 1)
            if unknown and self._loss(outlook, other, gamma) <= budget:
                return other
        return None

    def _unknown(self, rows: int, *, parked: bool) -> bool:
        """Never measured, or so long ago, for how often it was seen and confirmed, that it is worth a look.

        `parked`: nothing is drafted, so that no other round shows that the width has become cheaper than is believed.
        """
        samples, age = self.book.samples(rows), self.book.age(rows)
        if samples < 2:
            if rows not in self.rated:
                return True
            samples, age = 2, min(age, self.book.seen)
        return age > (PARKED_STALE if parked else min(STALE_SAMPLES * samples, STALE_AT_MOST)) << self.book.confirmed(rows)

    def _enclosed(self, rows: int) -> bool:
        """Long, never measured, and measured closely on both sides: what lies between says enough."""
        near = rows // 8
        return not self.book.samples(rows) and all(
            any(self.book.samples(rows + side * k) > 1 for k in range(1, near + 1)) for side in (-1, 1)
        )

    def _look_at_parked(self, outlooks: Mapping[str, _Outlook]) -> tuple[str, int, str] | None:
        for offer in self.offers:
            arm = self.memory.arm(offer)
            if arm.tried and self.memory.draft_costs(offer.drafter, self.hot).known:  # only what rows cost can be news
                gamma = self._detour(outlooks[offer.drafter], 0)
                if gamma:
                    return offer.drafter, gamma, f"{DETOUR} at {gamma} beside 0"
                continue
            gamma = self._follow_up(offer, arm) if arm.parked == 0 else 0
            if gamma:
                return offer.drafter, gamma, f"the look at a parked drafter went well: {DETOUR} again"
            gamma = self._look(offer, arm, outlooks[offer.drafter])
            if gamma:
                return offer.drafter, gamma, f"{DETOUR} at a parked drafter"
        return None

    def _pays(self, outlook: _Outlook, gamma: int) -> bool:
        """Clearly better than plain decoding."""
        return self._value(outlook, gamma) - self._value(outlook, 0) < -MARGIN * self.rate * outlook.tokens[gamma]

    def _follow_up(self, offer: Offer, arm: Arm) -> int:
        """After a good look: again and longer, while an optimist could still believe in it."""
        if not arm.promising or arm.streak > ENOUGH_LOOKS:
            return 0
        hopes = [min(alpha, HOPED_ACCEPTANCE) for alpha in arm.acceptance.alphas(self.limit, sigmas=LOOK_SIGMAS)]
        outlook = self._outlook(offer, hopes=hopes)
        gamma = self._best(outlook)
        return min(gamma, arm.run_kept + 1) if self._pays(outlook, gamma) else 0

    def _look(self, offer: Offer, arm: Arm, outlook: _Outlook) -> int:
        """Nodes to look at a parked drafter with, 0 if it is not due or not paid for."""
        hoped = self._outlook(offer, hopes=[HOPED_ACCEPTANCE] * self.limit)
        hopeless = not self._pays(hoped, self._best(hoped))
        undecided = arm.undecided and not hopeless
        interval = HOPELESS_INTERVAL if hopeless else min(FIRST_INTERVAL << arm.looks, LAST_INTERVAL)
        if not arm.unknown and arm.parked < (min(interval, SECOND_OPINION) if undecided else interval):
            return 0
        memory = self.memory
        least = self._loss(outlook, 1, 0)
        if memory.lost_ms + least > LOST_SHARE * memory.elapsed_ms:
            return 0
        budget = EXPLORE_SHARE * memory.ms_since_detour
        for gamma in range(min(LONGEST_LOOK, outlook.most), 1, -1):
            if self._loss(outlook, gamma, 0) <= LONG_LOOK_SHARE * budget:
                return gamma
        if least <= budget:
            return 1
        overdue = arm.parked >= LAST_INTERVAL and least <= PARKED_SHARE * memory.ms_since_detour
        return 1 if overdue or undecided else 0

    def _plain_reason(self, outlooks: Mapping[str, _Outlook]) -> str:
        best = min(min(a / b for a, b in zip(outlook.ms[1:], outlook.tokens[1:], strict=True)) for outlook in outlooks.values())
        return f"parked: drafting would cost {best:.3g} per token, plain {self.costs[0]:.3g}"


def _where(choice: Sequence[bool], this: Sequence[float], that: Sequence[float]) -> list[float]:
    return [a if chosen else b for chosen, a, b in zip(choice, this, that, strict=True)]
