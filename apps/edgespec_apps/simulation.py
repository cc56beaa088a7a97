"""Policies side by side on a device that is not here, in virtual time, watts and degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from edgespec.backends.simulated import VirtualDevice
from edgespec.core.device import DeviceProfile, UnitProfile
from edgespec.core.plan import Knobs, Plan
from edgespec.core.policy import Policy, RoundState
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.memory import DETOUR
from edgespec.scheduling.parse import GOVERNED, parse_policy
from edgespec_apps.texts import CONTEXT, Text
from edgespec_device_profiles import cooling
from edgespec_device_profiles.chips import Chip
from edgespec_device_profiles.estimates import ModelSize, Unit, bandwidth_gbs, pass_ms, units

LONGEST_FIXED = 8
ON_NPU = "@npu"
HOME: Unit = "gpu"  # where rounds run unless a plan moves them
PROFILED = (256, CONTEXT, 4096)  # contexts at which the profile knows what rows cost
CONTEXT_STEP = 128  # contexts that round to the same multiple cost the same

PassMs = Callable[[Unit, ModelSize, int, int], float]  # unit, model, rows, tokens known


@dataclass(frozen=True, slots=True)
class Work:
    """One round's work in ms at full speed: on the unit it ran on, and had it run on the GPU. `room`: nodes its answer had room for."""

    unit: Unit
    nominal_ms: float
    home_ms: float
    room: int


class Run(NamedTuple):
    """One policy's rounds, the device they left behind, and each round's work."""

    history: list[RoundTrace]
    device: VirtualDevice
    works: list[Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is simulated: a target and its draft on the GPU, unless a plan moves a round to the NPU, on one chip in one case.

    `draft` is the text's first drafter; None: its guesses cost nothing, as those of the others never do.
    """

    chip: Chip
    case: cooling.Case
    target: ModelSize
    draft: ModelSize | None
    text: Text
    minutes: float
    warm_minutes: float = 0.0  # of full work on the GPU before, the same for every policy and not counted
    knobs: Knobs = field(default_factory=Knobs)

    def policy(self, text: str) -> Policy:
        """As `parse_policy`, but the governor gets the simulated case's thermal model, and NAME@npu runs every round on the NPU."""
        if text.endswith(ON_NPU):
            if "npu" not in units(self.chip):
                raise ValueError(f"{text}: {self.chip.name} has no NPU figures")
            return _Elsewhere(self.policy(text.removesuffix(ON_NPU)))
        inner = parse_policy(text.removesuffix(GOVERNED))
        if not text.endswith(GOVERNED):
            return inner
        return Governor(inner, model=cooling.thermal_model(self.chip, self.case), serious_c=self.case.limit_c)

    def run(self, policy: Policy) -> Run:
        """Rounds until the minutes are over. The text says what is accepted, costs are the estimates'; the same every time."""
        device, reader = self._device(), self.text.reader()
        pass_ms = self._pass_ms()
        profile = self._profile(device, pass_ms)
        first, read = self.text.drafters[0], _Read()
        history, works = list[RoundTrace](), list[Work]()
        while device.clock_s < self.minutes * 60:
            power, known, room = device.state(), reader.context_len, reader.room
            offers = reader.offers(min(room, self.knobs.max_draft_tokens))
            state = RoundState(context_len=known, room=room, drafter=first, offers=offers, power=power, units=(HOME, "npu"))
            plan = policy(history, state, profile, self.knobs)
            began_s, began_mj, drafter = device.clock_s, device.energy_mj, plan.drafter or first
            allowed = max(0, min(plan.draft_tokens, room, self.knobs.max_draft_tokens))
            position = reader.position
            number = 0 if position == 0 or not history else history[-1].round + 1  # of the answer
            drafted, kept = reader.step(drafter, allowed)
            passes = read.passes(position, drafted, kept) if drafter == first and self.draft is not None else ()

            def work(unit: Unit, drafted: int = drafted, passes: Sequence[int] = passes, known: int = known) -> tuple[float, float]:
                """(draft ms, target ms) at full speed."""
                draft_ms = sum(pass_ms(unit, self.draft, rows, known) for rows in passes) if self.draft is not None else 0.0
                return draft_ms, pass_ms(unit, self.target, drafted + 1, known)

            unit: Unit = "npu" if plan.unit == "npu" else HOME
            draft_ms, target_ms = work(unit)
            drafted_ms, verified_ms = device.work(unit, draft_ms), device.work(unit, target_ms)
            works.append(Work(unit, draft_ms + target_ms, sum(work(HOME)), room))
            device.rest(plan.pause_ms)
            history.append(
                RoundTrace(
                    round=number,
                    context_len=known - 1,
                    drafter=drafter,
                    planned=plan.draft_tokens,
                    drafted=drafted,
                    kept=kept,
                    emitted=kept + 1,
                    rows=drafted + 1,
                    draft_ms=drafted_ms,
                    draft_engine_ms=drafted_ms,
                    verify_ms=verified_ms,
                    round_ms=(device.clock_s - began_s) * 1e3,
                    energy_mj=device.energy_mj - began_mj,
                    thermal=power.thermal,
                    temperature_c=power.temperature_c,
                    reason=plan.reason,
                    offers=offers,
                    trials=reader.trials(),
                )
            )
        return Run(history, device, works)

    def _device(self) -> VirtualDevice:
        device = cooling.device(self.chip, self.case)
        while device.clock_s < self.warm_minutes * 60:
            device.work(HOME, 100.0)
        device.clock_s = device.energy_mj = 0.0
        return device

    def _pass_ms(self) -> PassMs:
        """ms of one forward pass at full speed; contexts are rounded, so that few are ever computed."""

        @cache
        def rounded(unit: Unit, size: ModelSize, rows: int, steps: int) -> float:
            return pass_ms(self.chip, unit, size, rows=rows, context=steps * CONTEXT_STEP)

        return lambda unit, size, rows, known: rounded(unit, size, rows, round(known / CONTEXT_STEP))

    def _profile(self, device: VirtualDevice, pass_ms: PassMs) -> DeviceProfile:
        """What a profiling run would have found out: what units read per second and draw, and what rows cost on the GPU."""
        rows = range(1, self.knobs.max_draft_tokens + 2)
        forward_ms = {m: {context: pass_ms(HOME, self.target, m, context) for context in PROFILED} for m in rows}
        rated = {
            unit: UnitProfile(
                bandwidth_gbs=bandwidth_gbs(self.chip, unit), busy_w=device.busy_w[unit], forward_ms=forward_ms if unit == HOME else {}
            )
            for unit in units(self.chip)
        }
        return DeviceProfile(chip=self.chip.chip, units=rated, provenance="simulated")


class _Read:
    """How much of an answer a draft model has read. It reads what others wrote when it is asked again, in one pass."""

    def __init__(self) -> None:
        self._tokens = -1  # of the answer; the prompt is read but for its last token

    def passes(self, position: int, drafted: int, kept: int) -> list[int]:
        """Rows of each of its passes in a round that begins at `position`."""
        if position == 0:
            self._tokens = -1
        if drafted == 0:
            return []
        unread = position - self._tokens
        self._tokens = position + min(drafted - 1, kept)  # its last guess was never fed, and those refused are taken back
        return [unread] + [1] * (drafted - 1)


def summary(history: Sequence[RoundTrace], device: VirtualDevice, works: Sequence[Work]) -> dict[str, float]:
    """The figures of one policy's run; `flips` says what a plan flip is."""
    ends = np.cumsum([trace.round_ms for trace in history]) / 1e3
    tokens = np.array([trace.emitted for trace in history])
    minute = min(60.0, float(ends[-1]) / 2)
    return {
        "tokens": int(tokens.sum()),
        "tok_s_first_minute": float(tokens[ends <= minute].sum() / minute),
        "tok_s_last_minute": float(tokens[ends > ends[-1] - minute].sum() / minute),
        "peak_c": device.peak_c,
        "energy_j": device.energy_mj / 1e3,
        "plan_flips": flips(history, works),
        "wasted_drafts": int(sum(trace.drafted - trace.kept for trace in history)),
        "clock_share": sum(work.nominal_ms for work in works) / sum(trace.draft_ms + trace.verify_ms for trace in history),
        "npu_share": sum(trace.round_ms for trace, work in zip(history, works, strict=True) if work.unit == "npu") / 1e3 / float(ends[-1]),
    }


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a round did: nothing drafted is no drafter's. `cut`: by what was on offer or left, so the plan may have been longer."""

    drafter: str
    drafted: int
    cut: bool

    def agrees(self, other: _Choice) -> bool:
        if self.drafter != other.drafter:
            return False
        shorter, longer = sorted((self, other), key=lambda choice: choice.drafted)
        return shorter.drafted == longer.drafted or shorter.cut


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A policy all of whose rounds run on the NPU: what placement alone would bring."""

    inner: Policy

    @property
    def name(self) -> str:
        return self.inner.name + ON_NPU

    @property
    def wants_entropy(self) -> bool:
        return self.inner.wants_entropy

    def __call__(self, history: Sequence[RoundTrace], state: RoundState, profile: DeviceProfile, knobs: Knobs) -> Plan:
        return replace(self.inner(history, state, profile, knobs), unit="npu")


def flips(history: Sequence[RoundTrace], works: Sequence[Work]) -> int:
    """How often the plan changed its mind: another draft length or drafter than the last time that the same drafters made offers of
    the same confidence. One-round detours do not count, nor does a draft that is shorter because no more was on offer or left to say.
    """
    last: dict[tuple[tuple[str, int], ...], _Choice] = {}
    count = 0
    for trace, work in zip(history, works, strict=True):
        if DETOUR in trace.reason or work.room == 0:
            continue
        offered = next((offer.tokens for offer in trace.offers if offer.drafter == trace.drafter), None)
        most = work.room if offered is None else min(work.room, offered)
        choice = _Choice(trace.drafter if trace.drafted else "", trace.drafted, cut=trace.planned >= most)
        context = tuple((offer.drafter, offer.confidence) for offer in trace.offers)
        before = last.get(context, choice)
        agree = choice.agrees(before)
        count += not agree
        last[context] = max(before, choice, key=lambda one: (one.drafted, not one.cut)) if agree else choice
    return count


def compare(scene: Scene, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    return {text: summary(*run) for text, run in runs(scene, policies).items()}


def runs(scene: Scene, policies: Sequence[str]) -> dict[str, Run]:
    """ValueError names an unknown policy before anything is run."""
    parsed = {text: scene.policy(text) for text in policies}
    return {text: scene.run(policy) for text, policy in parsed.items()}


DEFAULT_POLICIES = (*(f"fixed:{n}" for n in range(LONGEST_FIXED + 1)), "adaptive", "adaptive+governor")
