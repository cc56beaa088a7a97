"""Does a model fit a device, what holds it back, how fast should it be, and what would change the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec import analysis
from edgespec_device_profiles import cooling
from edgespec_device_profiles.chips import Chip
from edgespec_device_profiles.estimates import BITS, ModelSize, Unit, pass_ms, units

SCHEMA = "edgespec.plan/1"
PROFILE = "`edgespec profile`"
RESERVE_SHARE = 0.25  # of the memory, for the system and everything else that runs
RESERVE_BYTES = 250e6  # beside weights and cache: buffers, tokenizer, interpreter
SPREAD = 0.35  # estimates of speed are off by about so much either way
LONGEST = 16
FREE_ROWS, MOST_ROWS = 1.25, 64
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model on a device, with what the user knows better than the chip file: memory, power and cores."""

    chip: Chip
    case: cooling.Case
    target: ModelSize
    draft: ModelSize | None
    memory_bytes: float
    watts: float | None
    cores: int | None
    alpha: float
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Milliseconds per token on one unit, cold, within the power allowed, and once the case is hot; and the watts that takes."""

    unit: Unit
    cold_ms: float
    powered_ms: float
    hot_ms: float
    watts: float


def answer(question: Question) -> dict[str, Any]:
    """Every figure that is not arithmetic on the question is an estimate."""
    needs = memory_needs(question)
    pace = min((_pace(question, unit) for unit in units(question.chip)), key=lambda pace: pace.hot_ms)
    draft = _draft(question, pace.unit)
    gain = draft["speed_up"] if draft else 1.0
    fits = needs["free_bytes"] >= 0
    tok_s = 1e3 / pace.hot_ms
    return {
        "schema": SCHEMA,
        "device": question.chip.name,
        "model": question.target.name,
        "estimates": True,
        "fits": fits,
        "memory": needs,
        "unit": pace.unit,
        "bound_by": bound_by(question, pace, fits),
        "tok_s": [tok_s / (1 + SPREAD), tok_s * (1 + SPREAD)],
        "tok_s_cold": 1e3 / pace.cold_ms,
        "joules_per_token": analysis.energy_per_token_mj(pace.watts, pace.hot_ms) / 1e3,
        "on_cores": _on_cores(question),
        "with_draft": {"tok_s": [gain * tok_s / (1 + SPREAD), gain * tok_s * (1 + SPREAD)], **draft} if draft else None,
        "would_change": changes(question, needs, pace),
        "rests_on": [f"{name}: {question.chip.figures[name].source}" for name in question.chip.estimates],
    }


def memory_needs(question: Question) -> dict[str, float]:
    """Bytes: what the models and one conversation need, what is available, and what is left (negative: missing)."""
    models = [size for size in (question.target, question.draft) if size is not None]
    weights = sum(size.weight_bytes for size in models)
    per_sequence = sum(size.kv_bytes_per_token for size in models) * question.context
    available = question.memory_bytes * (1 - RESERVE_SHARE) - RESERVE_BYTES
    return {
        "weight_bytes": weights,
        "kv_bytes": per_sequence,
        "available_bytes": available,
        "free_bytes": available - weights - per_sequence,
        "sequences": analysis.sequences_that_fit(available, weights, 0.0, per_sequence),
    }


def _pace(question: Question, unit: Unit) -> _Pace:
    cold = pass_ms(question.chip, unit, question.target, rows=1, context=question.context, cores=question.cores)
    device = cooling.device(question.chip, question.case)
    full_w, carried_w = device.busy_w[unit], cooling.sustained_w(question.chip, question.case)
    allowed_w = min(full_w, question.watts or full_w)
    powered = cold / cooling.speed_at(allowed_w, full_w)
    hot_w = min(allowed_w, carried_w)
    return _Pace(unit=unit, cold_ms=cold, powered_ms=powered, hot_ms=cold / cooling.speed_at(hot_w, full_w), watts=hot_w)


def _on_cores(question: Question) -> dict[str, float] | None:
    """The processor by itself, if the user says how many of its cores may work: the fastest unit may be out of reach of a program."""
    if question.cores is None:
        return None
    pace = _pace(question, "cpu")
    return {
        "cores": question.cores,
        "tok_s": 1e3 / pace.hot_ms,
        "tok_s_cold": 1e3 / pace.cold_ms,
        "joules_per_token": analysis.energy_per_token_mj(pace.watts, pace.hot_ms) / 1e3,
    }


def bound_by(question: Question, pace: _Pace, fits: bool) -> str:
    """The first thing that would have to change: memory, heat, power, compute or bandwidth."""
    if not fits:
        return "memory"
    if pace.hot_ms > 1.05 * pace.powered_ms:
        return "heat"
    if pace.powered_ms > 1.05 * pace.cold_ms:
        return "power"
    free = pass_ms(question.chip, pace.unit, question.target, rows=0, context=question.context, cores=question.cores)
    return "compute" if pace.cold_ms > 1.2 * free else "bandwidth"


def _draft(question: Question, unit: Unit) -> dict[str, Any] | None:
    """Which draft length is best at the assumed acceptance, and the three criteria of a fitting draft."""
    if question.draft is None:
        return None
    chip, target = question.chip, question.target
    one = pass_ms(chip, unit, target, rows=1, context=question.context, cores=question.cores)
    step = pass_ms(chip, unit, question.draft, rows=1, context=question.context, cores=question.cores)

    def row_cost(rows: int) -> float:
        return pass_ms(chip, unit, target, rows=rows, context=question.context, cores=question.cores) / one

    gamma, speed_up = analysis.best_draft_length(analysis.constant(question.alpha, LONGEST), rho=step / one, row_cost=row_cost)
    fit = analysis.draft_fit(
        draft_ms=step,
        target_ms=one,
        alpha=question.alpha,
        gamma=max(1, gamma),
        memory_share=question.draft.weight_bytes / target.weight_bytes,
    )
    return {
        "draft": question.draft.name,
        "assumed_acceptance": question.alpha,
        "best_draft_length": gamma,
        "speed_up": speed_up,
        "cost_of_8_rows": row_cost(8),
        "fast_enough": fit.speed,
        "small_enough": fit.memory,
    }


def changes(question: Question, needs: dict[str, float], pace: _Pace) -> list[str]:
    """What would change the answer, with figures."""
    out: list[str] = []
    target = question.target
    if needs["free_bytes"] < 0:
        room = needs["available_bytes"] - needs["kv_bytes"] - (question.draft.weight_bytes if question.draft else 0.0)
        if room > 0:
            smaller = f"at {BITS:g} bits a model of {room * 8 / BITS / 1e9:.1f} billion weights"
            out.append(f"at most {room * 8 / target.parameters:.1f} bits per weight, or {smaller}")
        whole = (needs["weight_bytes"] + needs["kv_bytes"] + RESERVE_BYTES) / (1 - RESERVE_SHARE)
        out.append(f"a device with {whole / GB:.1f} GB of memory")
    if pace.hot_ms > 1.05 * pace.powered_ms:
        out.append(f"cooling: never throttled it would run {pace.hot_ms / pace.powered_ms:.2f} times as fast")
    if pace.powered_ms > 1.05 * pace.cold_ms:
        out.append(f"power: unlimited it would run {pace.powered_ms / pace.cold_ms:.2f} times as fast")
    chip, context, cores = question.chip, question.context, question.cores
    costs = (pass_ms(chip, pace.unit, target, rows=m, context=context, cores=cores) for m in range(1, MOST_ROWS + 1))
    rows = sum(ms <= FREE_ROWS * pace.cold_ms for ms in costs)
    if question.draft is None and rows > 1:
        many = f"{rows - 1} guesses{' and more' * (rows == MOST_ROWS)}"
        out.append(f"a draft (--draft): checking {many} in one pass costs at most {FREE_ROWS - 1:.0%} more than writing one token")
    out.append(f"{PROFILE} on the device replaces these estimates by measurements")
    return out


def bytes_from(text: str) -> float:
    """ "4GB", "4 GB", "4000MB" or plain bytes. ValueError otherwise."""
    stripped = text.strip().lower().removesuffix("b")
    factor = {"g": 1e9, "m": 1e6, "k": 1e3}.get(stripped[-1:], 1.0)
    try:
        value = float(stripped.rstrip("gmk")) * factor
    except ValueError:
        raise ValueError(f"{text!r} is no amount of memory; write it like 4GB") from None
    if not 0 < value < 1e15:
        raise ValueError(f"{text!r} is no amount of memory; write it like 4GB")
    return value
