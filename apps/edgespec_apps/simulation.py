"""Policies side by side on a device that is not here, in virtual time, watts and degrees."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edgespec.backends.simulated import VirtualDevice
from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.plan import Knobs
from edgespec.core.policy import Policy, RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.memory import DETOUR
from edgespec.scheduling.parse import GOVERNED, parse_policy
from edgespec_device_profiles import cooling
from edgespec_device_profiles.chips import Chip
from edgespec_device_profiles.estimates import ModelSize, Unit, bandwidth_gbs, pass_ms, units

LONGEST_FIXED = 8
HOME: Unit = "gpu"  # where rounds run unless a plan moves them
CONTEXT = 1024  # every round is costed at this context: answers come and go


@dataclass(frozen=True, slots=True)
class Work:
    """One round's work in ms at full speed: on the unit it ran on, and had it run on the GPU."""

    unit: Unit
    nominal_ms: float
    home_ms: float


class Run(NamedTuple):
    """One policy's rounds, the device they left behind, and each round's work."""

    history: list[RoundTrace]
    device: VirtualDevice
    works: list[Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated: a target and its draft on the GPU, unless a plan moves a round to the NPU, on one chip in one case."""

    chip: Chip
    case: cooling.Case
    target: ModelSize
    draft: ModelSize | None  # None: guesses that cost nothing
    alpha: float
    minutes: float
    warm_minutes: float = 0.0  # of full work on the GPU before, the same for every policy and not counted
    seed: int = 0
    knobs: Knobs = field(default_factory=Knobs)

    def policy(self, text: str) -> Policy:
        """As `parse_policy`, but the governor gets the simulated case's thermal model."""
        inner = parse_policy(text.removesuffix(GOVERNED))
        if not text.endswith(GOVERNED):
            return inner
        return Governor(inner, model=cooling.thermal_model(self.chip, self.case), serious_c=self.case.limit_c)

    def run(self, policy: Policy) -> Run:
        """Rounds until the minutes are over. Acceptance is drawn, costs are the estimates'; the same seed gives the same run."""
        device, text = self._device(), _Text(self.alpha, self.seed)
        costs: dict[Unit, tuple[list[float], float]] = {unit: self._costs(unit) for unit in units(self.chip)}
        profile = self._profile(device, costs)
        history, works = list[RoundTrace](), list[Work]()
        while device.clock_s < self.minutes * 60:
            power = device.state()
            plan = policy(history, RoundState(context_len=CONTEXT, room=1 << 20, drafter="draft", power=power), profile, self.knobs)
            began_s, began_mj, n = device.clock_s, device.energy_mj, plan.draft_tokens
            unit: Unit = "npu" if plan.unit == "npu" else HOME
            target_ms, draft_ms = costs[unit]
            drafted_ms, verified_ms = device.work(unit, n * draft_ms), device.work(unit, target_ms[n])
            works.append(Work(unit, n * draft_ms + target_ms[n], n * costs[HOME][1] + costs[HOME][0][n]))
            device.rest(plan.pause_ms)
            kept = text.accepted(n)
            history.append(
                RoundTrace(
                    round=len(history),
                    context_len=CONTEXT,
                    drafter="draft",
                    planned=n,
                    drafted=n,
                    kept=kept,
                    emitted=kept + 1,
                    rows=n + 1,
                    draft_ms=drafted_ms,
                    draft_engine_ms=drafted_ms,
                    verify_ms=verified_ms,
                    round_ms=(device.clock_s - began_s) * 1e3,
                    energy_mj=device.energy_mj - began_mj,
                    thermal=power.thermal,
                    temperature_c=power.temperature_c,
                    reason=plan.reason,
                )
            )
        return Run(history, device, works)

    def _device(self) -> VirtualDevice:
        device = cooling.device(self.chip, self.case)
        while device.clock_s < self.warm_minutes * 60:
            device.work(HOME, 100.0)
        device.clock_s = device.energy_mj = 0.0
        return device

    def _costs(self, unit: Unit) -> tuple[list[float], float]:
        """(target ms for 1, 2, … rows, draft ms per token) at full speed."""
        most = self.knobs.max_draft_tokens
        target = [pass_ms(self.chip, unit, self.target, rows=m + 1, context=CONTEXT) for m in range(most + 1)]
        return target, 0.0 if self.draft is None else pass_ms(self.chip, unit, self.draft, rows=1, context=CONTEXT)

    def _profile(self, device: VirtualDevice, costs: Mapping[Unit, tuple[list[float], float]]) -> DeviceProfile:
        """What a profiling run would have found out: what units read per second and draw, and what rows cost on the GPU."""
        rated = {
            unit: UnitProfile(
                bandwidth_gbs=bandwidth_gbs(self.chip, unit),
                busy_w=device.busy_w[unit],
                forward_ms={rows: {CONTEXT: ms} for rows, ms in enumerate(costs[unit][0], start=1)} if unit == HOME else {},
            )
            for unit in units(self.chip)
        }
        return DeviceProfile(chip=self.chip.chip, units=rated, provenance="simulated")


class _Text:
    """Whether the drafter guesses right is drawn once per position of the text, so that every policy reads the same one."""

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._rng = alpha, np.random.default_rng(seed)
        self._right: list[bool] = []
        self._position = 0

    def accepted(self, drafted: int) -> int:
        """How many of so many guesses are right; the text moves on past them and past the token that the target adds."""
        while len(self._right) < self._position + drafted:
            self._right += (self._rng.random(4096) < self._alpha).tolist()
        kept = 0
        while kept < drafted and self._right[self._position + kept]:
            kept += 1
        self._position += kept + 1
        return kept


def summary(history: Sequence[RoundTrace], device: VirtualDevice, works: Sequence[Work]) -> dict[str, float]:
    """The figures of one policy's run. A flip is a change of draft length other than a one-round detour."""
    ends = np.cumsum([trace.round_ms for trace in history]) / 1e3
    tokens = np.array([trace.emitted for trace in history])
    path = [trace.planned for trace in history if DETOUR not in trace.reason]
    minute = min(60.0, float(ends[-1]) / 2)
    return {
        "tokens": int(tokens.sum()),
        "tok_s_first_minute": float(tokens[ends <= minute].sum() / minute),
        "tok_s_last_minute": float(tokens[ends > ends[-1] - minute].sum() / minute),
        "peak_c": device.peak_c,
        "energy_j": device.energy_mj / 1e3,
        "plan_flips": sum(a != b for a, b in itertools.pairwise(path)),
        "wasted_drafts": int(sum(trace.drafted - trace.kept for trace in history)),
        "clock_share": sum(work.nominal_ms for work in works) / sum(trace.draft_ms + trace.verify_ms for trace in history),
        "npu_share": sum(trace.round_ms for trace, work in zip(history, works, strict=True) if work.unit == "npu") / 1e3 / float(ends[-1]),
    }


def compare(scene: Scene, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    return {text: summary(*run) for text, run in runs(scene, policies).items()}


def runs(scene: Scene, policies: Sequence[str]) -> dict[str, Run]:
    """ValueError names an unknown policy before anything is run."""
    parsed = {text: scene.policy(text) for text in policies}
    return {text: scene.run(policy) for text, policy in parsed.items()}


DEFAULT_POLICIES = (*(f"fixed:{n}" for n in range(LONGEST_FIXED + 1)), "adaptive", "adaptive+governor")
