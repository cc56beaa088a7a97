"""What a simulated comparison showed, in words and as a page: speed, heat and plans over time, and where a gain comes from."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.core.trace import RoundTrace
from edgespec.scheduling.parse import GOVERNED
from edgespec_apps.simulation import ON_NPU, Run, Scene, Work, summary
from edgespec_device_profiles.layout import Finding, document, section, tabulate, verdict
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


CHANGES = (
    "Changes: another draft length or drafter than when the same was last on offer; looks aside for one round, and drafts cut short by an"
    " offer or the answer's end, do not count. Not kept: drafted tokens that the model refused."
)


def title(scene: Scene, where: str) -> str:
    """What is simulated, for how long; `where` names the case."""
    draft = scene.draft.name if scene.draft else "that costs nothing"
    minutes = f"{scene.minutes:g} simulated minute{'s' * (scene.minutes != 1)}"
    warm = f" after {scene.warm_minutes:g} minutes of full work" if scene.warm_minutes else ""
    return f"{minutes} of {scene.target.name}, draft {draft}, on {scene.chip.chip} ({where}){warm}"


def explain(found: Mapping[str, Run]) -> list[Finding]:
    """What heat leaves to win, then each policy that is not a fixed length: where its gain comes from, or that there is none."""
    fixed = _fixed(found)
    if not fixed:
        return []
    best = _best(found)
    share = Factors.of(found[best]).clock
    taken = 1.0 / share - 1.0
    heat = (
        "Heat takes no speed from it, so there is no throttling to avoid."
        if taken < NOTHING
        else f"Heat slows it to {share:.0%} of full speed on average. Never slowed, it would have written {taken:.0%} more tokens: avoiding"
        " throttling can win no more than that."
    )
    written = sum(trace.emitted for trace in found[best].history)
    first = Finding(f"{best} is the best fixed length, with {written} tokens.", heat)
    return [first, *(_gain(name, run, best, found[best]) for name, run in found.items() if name not in fixed)]


def _fixed(found: Mapping[str, Run]) -> list[str]:
    """Lengths on the unit where rounds run unless a plan moves them."""
    return [name for name in found if name.startswith("fixed:") and "+" not in name and ON_NPU not in name]


def _best(found: Mapping[str, Run]) -> str:
    """The fixed length that writes fastest; "" without any."""
    return max(_fixed(found), key=lambda name: Factors.of(found[name]).product, default="")


def _gain(name: str, run: Run, best: str, base: Run) -> Finding:
    ratio, ours, theirs = Factors.of(run).over(Factors.of(base)), summary(*run), summary(*base)
    gain = ratio.product - 1.0
    head = f"{name}: {gain:+.1%} tokens against {best}."
    if abs(gain) < NOTHING:
        return Finding(head, _no_gain(name, best, hot=theirs["clock_share"] < 1.0 - NOTHING), good=False)
    wasted, before = (row["wasted_drafts"] / max(1, row["tokens"]) for row in (ours, theirs))
    pace = "slower" if ratio.unit < 1.0 else "faster"
    parts = (
        (ratio.plan, f"draft plan ({_drafters(run)}{wasted:.2f} drafted tokens not kept per token, instead of {before:.2f})"),
        (ratio.unit, f"unit shift ({ours['npu_share']:.0%} of the time on the NPU, {pace} than the GPU at full speed)"),
        (ratio.clock, f"avoided throttling ({ours['clock_share']:.0%} of full speed on average, instead of {theirs['clock_share']:.0%})"),
        (ratio.work, "rests"),
    )
    said = [f"x{factor:.2f} {text}" for factor, text in parts if abs(factor - 1.0) >= NOTABLE]
    return Finding(head, f"From: {', '.join(said)}.{' These multiply.' if len(said) > 1 else ''}", good=gain > 0)


def _no_gain(name: str, best: str, *, hot: bool) -> str:
    if hot and not name.endswith((GOVERNED, ON_NPU)):
        return "No gain: without the governor it stays on one unit, where every plan heats alike."
    why = "every plan heats alike here, and no move to another unit clearly pays" if hot else "nothing gets too hot"
    return f"No gain is to be had: {why}, and adapting finds nothing better than one length. Which one, {best}, is known only in hindsight."


def _drafters(run: Run) -> str:
    """Who made the drafts, if more than one drafter did."""
    made = Counter(trace.drafter for trace in run.history if trace.drafted)
    if len(made) < 2:
        return ""
    return f"drafts by {', '.join(f'{name} {count / made.total():.0%}' for name, count in made.most_common())}; "


def _lead(found: Mapping[str, Run]) -> str:
    """The greatest gain of a policy that decides over the best fixed length."""
    best = _best(found)
    gains = {name: Factors.of(run).over(Factors.of(found[best])).product - 1.0 for name, run in found.items() if name not in _fixed(found)}
    if not best or not gains:
        return "Nothing to compare: a gain is that of a policy that decides over a fixed length."
    name = max(gains, key=lambda name: gains[name])
    if gains[name] < NOTHING:
        return f"No policy gains anything over {best}, the best fixed length."
    return f"{name} writes {gains[name]:.0%} more tokens than {best}, the best fixed length."


def page(scene: Scene, where: str, found: Mapping[str, Run], fit_error: float) -> str:
    """The report as one HTML page that needs nothing else; `where` names the case."""
    shown = _shown(found)
    sections = [
        verdict(_lead(found), explain(found), ["All figures are estimates: no device was measured."]),
        section(
            "Totals",
            f"Full speed: what heat left of it on average. {CHANGES}",
            _totals(found),
        ),
        section(
            "Speed over time",
            "Plain decoding, the best fixed length, and the policies that decide. Ups and downs that all share are the"
            " text's: some of it is easier to guess. A lasting fall is heat.",
            _speed(shown),
        ),
        section(
            "Temperature over time",
            "The highest of each stretch. A line along the throttling limit means that heat sets the speed.",
            _temperature(scene, shown),
        ),
        section("Draft length over time", "Tokens that the policy allowed a draft, mean of each stretch.", _plans(shown)),
        section(
            "Share of the time on the NPU",
            "The rest is the GPU's. The governor moves rounds to the NPU, which draws less, when heat costs more than the move.",
            _units(shown),
        ),
        section(
            "What this rests on",
            f"Case: {scene.case.source}. Throughput after ten minutes in the published phone runs is met within {fit_error:.1%}."
            f" Cost of rows: a roofline from published bandwidth and compute. {scene.text.note} Every policy reads the same text.",
        ),
    ]
    return document(title(scene, where), scene.text.title, "", sections)


def _shown(found: Mapping[str, Run]) -> dict[str, Run]:
    """The best fixed length, plain decoding, and every policy that decides."""
    return {name: run for name, run in found.items() if name not in _fixed(found) or name in (_best(found), "fixed:0")}


def _totals(found: Mapping[str, Run]) -> str:
    head = (
        "policy",
        "tokens",
        "first min, tok/s",
        "last min, tok/s",
        "peak, °C",
        "J",
        "J/token",
        "changes",
        "not kept",
        "full speed",
        "on NPU",
    )
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
    """(minutes at the end, figure) of equal stretches of time."""
    ends = np.cumsum([trace.round_ms for trace in run.history]) / 60e3
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
    return chart("Speed over time", Axis(label="minutes", low=0), Axis(label="tokens per second", low=0), lines)


def _temperature(scene: Scene, shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: max(trace.temperature_c or 0.0 for trace, _ in stretch))
    end = max(line.points[-1][0] for line in lines)
    coolest = min(degrees for line in lines for _, degrees in line.points)
    limit, critical = scene.case.limit_c, next(iter(shown.values())).device.critical_c
    lines += [
        Line(name=f"throttles at {limit:g} °C", points=[(0, limit), (end, limit)], guide=True),
        Line(name=f"critical at {critical:g} °C", points=[(0, critical), (end, critical)], guide=True, style=1),
    ]
    return chart(
        "Temperature over time", Axis(label="minutes", low=0), Axis(label="°C", low=min(coolest, limit) - 5.0, high=critical + 2.0), lines
    )


def _plans(shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: sum(trace.planned for trace, _ in stretch) / len(stretch))
    return chart("Draft length over time", Axis(label="minutes", low=0), Axis(label="tokens drafted", low=0), lines)


def _units(shown: Mapping[str, Run]) -> str:
    lines = _lines(shown, lambda stretch: _seconds([pair for pair in stretch if pair[1].unit == "npu"]) / _seconds(stretch))
    return chart(
        "Share of the time on the NPU",
        Axis(label="minutes", low=0),
        Axis(label="time on the NPU", low=0, high=1.04, ticks=(0, 0.5, 1), text=lambda share: f"{share:.0%}"),
        lines,
    )
