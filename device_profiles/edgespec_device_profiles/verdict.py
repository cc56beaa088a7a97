"""A measured profile in words: which draft length is best for which kind of text, why, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median

from edgespec_device_profiles.layout import Finding
from edgespec_device_profiles.measured import Kind, Measured
from edgespec_device_profiles.outlook import Step, alphas, best, outlook

FEW_ROUNDS = 40  # below which a figure is a hint
DRIFT_LIMIT = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`draft_tokens` 0: do not draft. `measured`: speculative over plain speed with the policy of the run over so many pairs of
    `answers`, where it was measured.
    """

    kind: str
    draft_tokens: int
    expected: float
    measured: float | None
    answers: int
    why: str
    thin: bool

    @property
    def headline(self) -> str:
        n = self.draft_tokens
        words = f"draft {n} token{'s' * (n > 1)} on {self.kind}: {self.expected:.2f}x expected" if n else f"do not draft on {self.kind}"
        return f"Perhaps {words}" if self.thin else words[0].upper() + words[1:]

    def finding(self, policy: str) -> Finding:
        """For a reader; `policy` made the measured answers."""
        answers = f"{self.answers} answer{'s' * (self.answers != 1)}"
        measured = "" if self.measured is None else f" ({self.measured:.2f}x measured with policy {policy} on {answers})"
        few = " Few rounds: a hint, not a finding." if self.thin else ""
        lost = bool(self.draft_tokens) and self.measured is not None and self.measured < 1.0
        doubt = " The measured answers gained nothing, so this expectation is unproven." if lost else ""
        return Finding(f"{self.headline}{measured}.", f"{self.why}{few}{doubt}", None if lost else bool(self.draft_tokens))


def verdicts(measured: Measured) -> list[Verdict]:
    """One for each kind of text whose acceptance and costs are known."""
    out: list[Verdict] = []
    for name, kind in measured.kinds.items():
        steps = outlook(measured, kind)
        chosen = best(steps)
        if chosen is None:
            continue
        out.append(
            Verdict(
                kind=name,
                draft_tokens=chosen.draft_tokens,
                expected=chosen.speed_up,
                measured=gain(measured, name),
                answers=len(_speeds(measured, name, "speculative")),
                why=_why(kind, steps, chosen),
                thin=_thin(kind),
            )
        )
    return out


def _thin(kind: Kind) -> bool:
    return kind.rounds < FEW_ROUNDS


def _why(kind: Kind, steps: Sequence[Step], chosen: Step) -> str:
    asked, offered = kind.rounds, kind.offered[0] if kind.offered else 0
    if not offered:
        return f"In {asked} rounds there was never anything to guess."
    right = f"{alphas(kind)[0]:.0%} of the first guesses are right" + (
        f", and there is something to guess in {offered / asked:.0%} of the rounds" if offered < asked else ""
    )
    plain_ms = steps[0].ms
    if chosen.draft_tokens:
        more = steps[-1]
        cost = f"a round takes as long as {chosen.ms / plain_ms:.2f} plain tokens and gives {chosen.tokens:.2f}"
        longer = ""
        if more.draft_tokens > chosen.draft_tokens:
            beyond = "less" if more.speed_up < chosen.speed_up else "too little more to count"
            longer = f"; drafting {more.draft_tokens} would give {more.speed_up:.2f}x, {beyond}"
        return f"{right}; {cost}{longer}."
    top = max(steps[1:], key=lambda step: step.speed_up, default=steps[0])
    cost = (
        f"at the best length ({top.draft_tokens}) a round takes as long as {top.ms / plain_ms:.2f} plain tokens and gives {top.tokens:.2f}"
    )
    return f"{right}; {cost}: {top.speed_up:.2f}x is no gain worth having."


def overall(measured: Measured) -> str:
    """The length to take if one must serve every kind of text, in words; "" if nothing is known."""
    step = one_for_all(measured)
    if step is None:
        return ""
    if not step.draft_tokens:
        return "Do not draft if one setting must serve all: over these kinds of text nothing is gained."
    tokens = f"{step.draft_tokens} token{'s' * (step.draft_tokens > 1)}"
    return f"Draft {tokens} if one length must serve all: {step.speed_up:.2f}x expected over these kinds of text."


def warnings(measured: Measured) -> list[str]:
    """Why these figures may not be what a quiet, cool machine would show."""
    out: list[str] = []
    if not measured.complete:
        out.append("The run is not complete; what is missing is listed as not measured.")
    if measured.hot_samples:
        out.append(f"{measured.hot_samples} samples were taken while the device was hot; none of them is in these figures.")
    load, cores = measured.machine.load_before, measured.machine.cores
    if load is not None and load > 0.5 * cores:
        out.append(f"The machine was busy before the run ({load:.1f} runnable tasks on {cores} cores): trust ratios, not times.")
    change = drift(measured, "plain")
    if change is not None and abs(change.change) > DRIFT_LIMIT:
        out.append(f"Plain speed changed by {change.change:+.0%} during the run (heat or other work): measure again when it is quiet.")
    return out


def one_for_all(measured: Measured) -> Step | None:
    """The single length with the best geometric mean over the kinds (`speed_up` is that mean; tokens and ms are the first kind's).

    Kinds with few rounds have a say only if there is no other.
    """
    kinds = [kind for kind in measured.kinds.values() if not _thin(kind)] or list(measured.kinds.values())
    curves = [steps for kind in kinds if (steps := outlook(measured, kind))]
    if not curves:
        return None
    means: list[Step] = []
    for gamma in range(max(map(len, curves))):
        at = [steps[min(gamma, len(steps) - 1)] for steps in curves]  # beyond what was ever offered nothing changes
        mean = math.exp(sum(math.log(step.speed_up) for step in at) / len(at))
        means.append(Step(gamma, at[0].tokens, at[0].ms, mean))
    return best(means)


def gain(measured: Measured, kind: str) -> float | None:
    """Speculative over plain speed on the same prompts: harmonic means, because answers are equally long, not equally fast."""
    plain, speculative = (_speeds(measured, kind, mode) for mode in ("plain", "speculative"))
    return harmonic_mean(speculative) / harmonic_mean(plain) if plain and speculative else None


def _speeds(measured: Measured, kind: str, mode: str) -> list[float]:
    return [a.tok_s for a in measured.sustained if (a.kind, a.mode) == (kind, mode) and a.tok_s > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Tokens per second in the first and the last third of the sustained phase, every kind of text weighed alike."""

    first_tok_s: float
    last_tok_s: float

    @property
    def change(self) -> float:
        return self.last_tok_s / self.first_tok_s - 1.0


def drift(measured: Measured, mode: str) -> Drift | None:
    """None with fewer than six answers."""
    usual = {kind: median(speeds) for kind in measured.kinds if (speeds := _speeds(measured, kind, mode))}
    relative = [a.tok_s / usual[a.kind] for a in measured.sustained if a.mode == mode and a.tok_s > 0 and a.kind in usual]
    third = len(relative) // 3
    if third < 2:
        return None
    mean = sum(usual.values()) / len(usual)
    return Drift(first_tok_s=mean * median(relative[:third]), last_tok_s=mean * median(relative[-third:]))
