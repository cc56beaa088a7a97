"""Lower any policy's plans when the device is hot, low on battery or asked to save power; raise them back when it is not.

It sits around a policy and changes plans only: how much is drafted, where, and how long the device rests between rounds.
Text cannot change, because every plan is exact. Heat acts at once and is let go slowly: a level holds until nothing has asked
for it for `HOLD_S` seconds of work, so that a device at the edge does not flap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import Policy, RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.folding import HistoryFold
from edgespec.scheduling.thermal import ThermalModel, ThermalState

HOLD_S = 15.0
SPEED_EXPONENT = 1.3  # κ in power ∝ speed^κ, fitted to published sustained runs of one phone
CLEARLY = 1.15
FORECAST_S = 30.0
LONGEST_ROUND = 3.0  # times the usual one; what a round took beyond counts for no rest
HEAT: Mapping[str, int] = {"nominal": 0, "fair": 1, "serious": 2, "critical": 3}
LOW_BATTERY, VERY_LOW_BATTERY = 0.2, 0.1


@dataclass(frozen=True, slots=True)
class Level:
    """What a level allows. `duty`: share of the time the device works.

    Resting is the last resort: a device that slows itself does the same work with less power than one that runs and rests.
    """

    name: str
    draft_tokens: int | None = None
    saving: bool = False  # choose by joules rather than milliseconds, draft nothing ahead
    cooler: bool = False  # work on the cooler unit; before the limit is reached that would give speed away
    duty: float = 1.0


LEVELS = (
    Level("free"),
    Level("eased", draft_tokens=8, saving=True),
    Level("restrained", draft_tokens=6, saving=True, cooler=True),
    Level("spared", draft_tokens=4, saving=True, cooler=True, duty=0.8),
)


@dataclass(slots=True)
class _Heat:
    """The folded history: seconds of work, recent demands for a level, and where the thermal model stands."""

    state: ThermalState | None
    work_s: float = 0.0
    round_ms: float = 0.0
    watts: float | None = None
    demands: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])  # (work_s, level), levels falling

    def held(self) -> int:
        return self.demands[0][1] if self.demands else 0

    def demand(self, level: int) -> None:
        """Sliding maximum over the last HOLD_S seconds."""
        while self.demands and self.demands[-1][1] <= level:
            self.demands.pop()
        self.demands.append((self.work_s, level))
        while self.demands[0][0] < self.work_s - HOLD_S:
            self.demands.popleft()


class Governor:
    """`policy` under the eyes of battery and heat. With a thermal `model` and an energy meter it acts before `serious_c` is reached."""

    def __init__(self, policy: Policy, *, model: ThermalModel | None = None, serious_c: float = 85.0) -> None:
        self._policy, self._model, self._serious_c = policy, model, serious_c
        self._fold = HistoryFold(self._start, self._learn)

    @property
    def name(self) -> str:
        return f"{self._policy.name}+governor"

    @property
    def wants_entropy(self) -> bool:
        return self._policy.wants_entropy

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        heat = self._fold(history)
        asked, why = _wish(state.power, knobs)
        if heat.held() > asked:
            asked, why = heat.held(), "heat, now or lately"
        level = LEVELS[asked]
        if not asked:
            return self._policy(history, state, profile, knobs)
        if level.saving:  # a policy must not price what it will not get
            state = replace(state, offers=tuple(replace(offer, ahead=False) for offer in state.offers))
        plan = self._policy(history, state, profile, _narrowed(knobs, level))
        return _lowered(plan, level, why, cooler_unit(profile, state.units) if level.cooler else "", heat.round_ms)

    def _start(self) -> _Heat:
        return _Heat(self._model.cold() if self._model else None)

    def _learn(self, heat: _Heat, trace: RoundTrace) -> _Heat:
        seconds = trace.round_ms / 1e3
        heat.work_s += seconds
        usual_ms = heat.round_ms or trace.round_ms
        heat.round_ms = usual_ms + 0.1 * (min(trace.round_ms, LONGEST_ROUND * usual_ms) - usual_ms)  # a stopped process did no work
        if trace.energy_mj is not None and trace.round_ms > 0:
            watts = trace.energy_mj / trace.round_ms
            heat.watts = watts if heat.watts is None else heat.watts + 0.1 * (watts - heat.watts)
        level = HEAT.get(trace.thermal or "nominal", 0)
        if heat.state is not None and heat.watts is not None:
            heat.state = heat.state.after(heat.watts, seconds)
            if trace.temperature_c is not None:
                heat.state = heat.state.at(trace.temperature_c)
            if heat.state.after(heat.watts, FORECAST_S).celsius >= self._serious_c:
                level = max(level, HEAT["fair"])
        heat.demand(level)
        return heat


def _wish(power: PowerThermalState | None, knobs: Knobs) -> tuple[int, str]:
    """(level, reason) that the present state asks for. Old readings of heat still count: nothing says that it has cooled."""
    if power is None:
        return 0, ""
    wishes = [(HEAT[power.thermal], f"thermal state {power.thermal}" + (" (old reading)" if power.stale else ""))]
    if power.low_power_mode:
        wishes.append((1, "low-power mode"))
    if power.source == "battery":
        if knobs.energy == "saver":
            wishes.append((1, "on battery, saving"))
        if power.battery is not None and knobs.energy != "fast" and power.battery < LOW_BATTERY:
            wishes.append((2 if power.battery < VERY_LOW_BATTERY else 1, f"battery at {power.battery:.0%}"))
    return max(wishes, key=lambda wish: wish[0])


def cooler_unit(profile: DeviceProfile, among: Sequence[str]) -> str:
    """Of these units the one that decodes fastest on a device that heat holds back, or "" where it is not clearly another than the fastest.

    Decoding is bound by bandwidth, and a throttled unit's speed goes with watts^(1/κ): the score is bandwidth / busy watts^(1/κ).
    """
    rated = {
        name: (unit.bandwidth_gbs, unit.bandwidth_gbs / unit.busy_w ** (1.0 / SPEED_EXPONENT))
        for name, unit in profile.units.items()
        if name in among and unit.bandwidth_gbs and unit.busy_w
    }
    if len(rated) < 2:
        return ""
    fastest = max(rated, key=lambda name: rated[name][0])
    best = max(rated, key=lambda name: rated[name][1])
    return best if rated[best][1] > CLEARLY * rated[fastest][1] else ""


def _narrowed(knobs: Knobs, level: Level) -> Knobs:
    """What the level leaves of the user's limits, so that the policy chooses within them."""
    most = knobs.max_draft_tokens if level.draft_tokens is None else min(knobs.max_draft_tokens, level.draft_tokens)
    return replace(knobs, max_draft_tokens=most, energy="saver" if level.saving else knobs.energy)


def _lowered(plan: Plan, level: Level, why: str, unit: str, round_ms: float) -> Plan:
    most = plan.draft_tokens if level.draft_tokens is None else min(plan.draft_tokens, level.draft_tokens)
    return replace(
        plan,
        draft_tokens=most,
        rows=None if plan.rows is None else min(plan.rows, most + 1),
        ahead=0 if level.saving else plan.ahead,
        unit=plan.unit or unit,
        pause_ms=max(plan.pause_ms, round_ms * (1.0 / level.duty - 1.0)),
        reason=f"{level.name}: {why}; {plan.reason}",
    )
