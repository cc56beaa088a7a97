"""What a simulated comparison showed, in words and as a page: speed, heat and plans over time, and where a gain comes from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.trace import RoundTrace
from edgespec.scheduling.parse import GOVERNED
from edgespec_apps.simulation import Run, Scene, Work, summary
from edgespec_device_profiles.layout import document, section, tabulate
from edgespec_device_profiles.svg import Axis, Line, Point, chart

POINTS = 40  # per line
NOTHING = 0.01  # a difference below this is none
NOTABLE = 0.005


@dataclass(frozen=True, slots=True)
class Factors:
    """Tokens per second = plan · unit · clock · work, in that order: the ratios of two runs multiply to the ratio of their tokens."""

    plan: float  # tokens per ms of work, had it all run on the GPU at full speed
    unit: float  # that work over the work on the units chosen, at full speed
    clock: float  # work at full speed over the time it took
    work: float  # share of the time that the device worked

    @classmethod
    def of(cls, run: Run) -> Factors:
        tokens = sum(trace.emitted for trace in run.history)
        home = sum(work.home_ms for work in run.works)
        nominal = sum(work.nominal_ms for work in run.works)
        busy = sum(trace.draft_ms + trace.verify_ms for trace in run.history)
        return cls(tokens / home, home / nominal, nominal / busy, busy / sum(trace.round_ms for trace in run.history))

    def over(self, other: Factors) -> Factors:
        return Factors(self.plan / other.plan, self.unit / other.unit, self.clock / other.clock, self.work / other.work)

    @property
    def product(self) -> float:
        return self.plan * self.unit * self.clock * self.work


def explain(found: Mapping[str, Run]) -> list[str]:
    """A sentence or two on each policy that is not a fixed length: where its gain comes from, or that there is none to be had."""
    fixed = {name: Factors.of(run) for name, run in found.items() if name.startswith("fixed:") and "+" not in name}
    if not fixed:
        return []
    best = max(fixed, key=lambda name: fixed[name].product)
    taken = 1.0 / fixed[best].clock - 1.0
    heat = (
        f"Heat takes no speed from {best}, the best fixed length."
        if taken < NOTHING
        else f"Heat slows {best}, the best fixed length, to {fixed[best].clock:.0%} of full speed on average: never slowed it would have"
        f" written {taken:+.0%} tokens, and no plan on the same unit can win more than that."
    )
    return [heat, *(_gain(name, run, best, found[best]) for name, run in found.items() if name not in fixed)]


def _gain(name: str, run: Run, best: str, base: Run) -> str:
    ratio, ours, theirs = Factors.of(run).over(Factors.of(base)), summary(*run), summary(*base)
    gain = ratio.product - 1.0
    head = f"{name}: {gain:+.1%} tokens against {best}."
    if abs(gain) < NOTHING:
        hot = theirs["clock_share"] < 1.0 - NOTHING
        if hot and not name.endswith(GOVERNED):
            return f"{head} Without the governor it stays on one unit, where every plan heats alike: no gain."
        why = "every plan heats alike here and no move to another unit pays clearly" if hot else "nothing gets too hot"
        return f"{head} Physics leaves no gain: {why}, and one length is right all the time; {best} is known only in hindsight."
    wasted, before = (row["wasted_drafts"] / max(1, row["tokens"]) for row in (ours, theirs))
    parts = (
        (ratio.plan, f"draft lengths (wasted drafts per token {wasted:.2f} instead of {before:.2f})"),
        (ratio.unit, f"unit shift (the NPU had {ours['npu_share']:.0%} of the time; what that costs or brings at full speed)"),
        (ratio.clock, f"avoided throttling ({ours['clock_share']:.0%} of full speed on average instead of {theirs['clock_share']:.0%})"),
        (ratio.work, "rests"),
    )
    said = ", ".join(f"{text} x{factor:.2f}" for factor, text in parts if abs(factor - 1.0) >= NOTABLE)
    return f"{head} Factors: {said}."


def page(scene: Scene, found: Mapping[str, Run], fit_error: float) -> str:
    """The report as one HTML page that needs nothing else."""
    shown = _shown(found)
    models = f"{scene.target.name}, draft {scene.draft.name if scene.draft else 'that costs nothing'}, {scene.text.title}"
    sections = [
        section("What came of it", " ".join(explain(found)) or "No fixed length to compare with."),
        section("Totals", "All figures are estimates: no device was measured.", _totals(found)),
        section("Speed over time", "Draft lengths that stay beside the policies that decide.", _speed(shown)),
        section("Temperature over time", "", _temperature(scene, shown)),
        section("Draft length over time", "Means over short stretches.", _plans(shown)),
        section("Share of the work on the NPU", "The rest runs on the GPU.", _units(shown)),
        section(
            "What this rests on",
            f"Case: {scene.case.source}. Throughput after ten minutes in the published phone runs is met within {fit_error:.1%}."
            f" Cost of rows: a roofline from published bandwidth and compute. {scene.text.note} Every policy reads the same text.",
        ),
    ]
    start = f" after {scene.warm_minutes:g} minutes of full work" if scene.warm_minutes else ""
    return document(f"{scene.minutes:g} simulated minutes on {scene.chip.chip}{start}", models, "", sections)


def _shown(found: Mapping[str, Run]) -> dict[str, Run]:
    """The best fixed length, plain decoding, and every policy that decides."""
    fixed = [name for name in found if name.startswith("fixed:") and "+" not in name]
    best = max(fixed, key=lambda name: sum(trace.emitted for trace in found[name].history), default="")
    return {name: run for name, run in found.items() if name not in fixed or name in (best, "fixed:0")}


def _totals(found: Mapping[str, Run]) -> str:
    head = ("policy", "tokens", "first min, tok/s", "last min, tok/s", "peak, °C", "J", "J/token", "flips", "wasted", "clock", "on NPU")
    rows: list[tuple[str, ...]] = []
    for name, run in found.items():
        row = summary(*run)
        figures = (row["tokens"], row["tok_s_first_minute"], row["tok_s_last_minute"], row["peak_c"], row["energy_j"])
        texts = [f"{value:.{digits}f}" for value, digits in zip(figures, (0, 1, 1, 1, 0), strict=True)]
        texts.append(f"{row['energy_j'] / max(1, row['tokens']):.3f}")
        texts += [f"{row['plan_flips']:.0f}", f"{row['wasted_drafts']:.0f}", f"{row['clock_share']:.0%}", f"{row['npu_share']:.0%}"]
        rows.append((name, *texts))
    return tabulate(head, rows)


Stretch = Sequence[tuple[RoundTrace, Work]]


def _over_time(run: Run, figure: Callable[[Stretch], float]) -> list[Point]:
    """(s at the end, figure) of equal stretches of time."""
    ends = np.cumsum([trace.round_ms for trace in run.history]) / 1e3
    pairs = list(zip(run.history, run.works, strict=True))
    edges = np.searchsorted(ends, np.linspace(0.0, float(ends[-1]), POINTS + 1)[1:-1]).tolist()
    cuts = [0, *edges, len(pairs)]
    return [(float(ends[b - 1]), figure(pairs[a:b])) for a, b in itertools.pairwise(cuts) if b > a]


def _lines(shown: Mapping[str, Run], figure: Callable[[Stretch], float]) -> list[Line]:
    return [Line(name=name, points=_over_time(run, figure), style=i) for i, (name, run) in enumerate(shown.items())]


def _seconds(stretch: Stretch) -> float:
    return sum(trace.round_ms for trace, _ in stretch) / 1e3


def _speed(shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: sum(trace.emitted for trace, _ in stretch) / _seconds(stretch))
    return chart("Speed over time", Axis(label="seconds", low=0), Axis(label="tokens per second", low=0), lines)


def _temperature(scene: Scene, shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: max(trace.temperature_c or 0.0 for trace, _ in stretch))
    end = max(line.points[-1][0] for line in lines)
    limit, critical = scene.case.limit_c, next(iter(shown.values())).device.critical_c
    lines += [
        Line(name=f"throttles at {limit:g}", points=[(0, limit), (end, limit)], guide=True),
        Line(name=f"critical at {critical:g}", points=[(0, critical), (end, critical)], guide=True, style=1),
    ]
    return chart("Temperature over time", Axis(label="seconds", low=0), Axis(label="°C", high=critical + 2.0), lines)


def _plans(shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: sum(trace.planned for trace, _ in stretch) / len(stretch))
    return chart("Draft length over time", Axis(label="seconds", low=0), Axis(label="tokens drafted", low=0), lines)


def _units(shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: _seconds([pair for pair in stretch if pair[1].unit == "npu"]) / _seconds(stretch))
    return chart(
        "Share of the work on the NPU",
        Axis(label="seconds", low=0),
        Axis(label="share", low=0, high=1.04, ticks=(0, 0.5, 1), text=lambda share: f"{share:.0%}"),
        lines,
    )
