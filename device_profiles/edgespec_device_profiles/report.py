"""A profile as one HTML page that needs nothing else: the verdict first, then the plots it rests on, then the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec_device_profiles.layout import document, section, tabulate, verdict
from edgespec_device_profiles.measured import OTHER_CONTEXT, OTHER_ROWS, Measured
from edgespec_device_profiles.outlook import MARGIN, alphas, outlook
from edgespec_device_profiles.svg import Axis, Line, Point, chart
from edgespec_device_profiles.verdict import DRIFT_LIMIT, drift, gain, overall, verdicts, warnings


def page(measured: Measured) -> str:
    """The report on one profile."""
    model = measured.model
    sections = [
        _verdict(measured),
        section(
            "Which draft length is best?",
            "Expected speed if always up to so many tokens are drafted, against plain decoding (1x), from the measured costs and the"
            f" measured acceptance below. Above 1x drafting pays. A ring marks the shortest length within {MARGIN:.0%} of the best.",
            speed_up_chart([("", measured)]),
            _kinds_table(measured),
        ),
        section(
            "What checking guesses costs",
            "A row is one token that a pass of the model takes in: plain decoding has one, and every guess to check adds one. Were rows"
            " free, guesses would be checked for nothing; were the cost linear, checking a guess would cost as much as writing a token."
            " The lower the line, the more drafting pays.",
            rows_chart([("", measured)]),
            _rows_table(measured),
        ),
        section(
            "How often guesses are right",
            "Share of guesses accepted at each position, given that all before it in the draft were. A line that stays high rewards long"
            " drafts; a low start means that many drafts fail at once.",
            acceptance_chart([("", measured)]),
        ),
        section("Speed over time", _time_text(measured), time_chart(measured), _drift_table(measured), _gains_table(measured)),
        section("What the memory allows", _roof_text(measured), roof_chart(measured)),
        section("What the scheduler chose", _scheduler_text(measured), _scheduler_table(measured)),
        section(
            "Other engines",
            f"The same model on what else runs here, at a context of {OTHER_CONTEXT} tokens; `--engine NAME` chooses one.",
            _engines_table(measured),
        ),
        section("Machine and provenance", "", _facts_table(measured)),
        section("Not measured", "", _missing_table(measured)),
    ]
    return document(
        f"{model.name} on {measured.machine.processor}", f"{model.engine}, draft {measured.draft.name}", measured.date, sections
    )


def comparison(a: Measured, b: Measured) -> str:
    """The report on two profiles side by side; A is drawn first, B is what changed."""
    names = _names(a, b)
    pair = [(names[0], a), (names[1], b)]
    rows = [(what, _number(x), _number(y), _ratio(x, y)) for what, x, y in differences(a, b)]
    sections = [
        section(
            "What differs",
            f"A is {names[0]}, B is {names[1]}; the ratio is B over A.",
            tabulate(("", "A", "B", "B / A"), rows),
        ),
        *(
            section(f"Expected speed-up on {kind}", "", speed_up_chart(pair, kinds=[kind], title=f"Expected speed-up on {kind}"))
            for kind in a.kinds
            if kind in b.kinds
        ),
        section("What checking guesses costs", "At the shortest context.", rows_chart(pair, shortest_only=True)),
        section("How often guesses are right", "", acceptance_chart(pair)),
        section("A", "", _facts_table(a)),
        section("B", "", _facts_table(b)),
    ]
    return document("Two profiles compared", f"{names[0]} and {names[1]}", "", sections)


def _names(a: Measured, b: Measured) -> tuple[str, str]:
    names = [f"{m.model.name}, draft {m.draft.name}, {m.date[:10]}" for m in (a, b)]
    if names[0] == names[1]:
        names = [f"{m.model.name}, draft {m.draft.name}, {m.date[:19].replace('T', ' ')}" for m in (a, b)]
    return names[0], names[1]


def differences(a: Measured, b: Measured) -> list[tuple[str, float, float]]:
    """(what, in A, in B) of every figure that both have."""
    out: list[tuple[str, float | None, float | None]] = [
        ("memory bandwidth, GB/s", a.unit.bandwidth_gbs, b.unit.bandwidth_gbs),
        ("smallest pass, ms", a.unit.dispatch_floor_ms, b.unit.dispatch_floor_ms),
        ("draft, ms per token", a.draft.ms_per_token, b.draft.ms_per_token),
        ("rest of a round, ms", a.other_ms, b.other_ms),
        ("slow-down with a second unit at work", a.overlap_penalty, b.overlap_penalty),
    ]
    for rows, by_context in a.unit.forward_ms.items():
        for context, ms in by_context.items():
            out.append((f"pass of {rows} rows at context {context}, ms", ms, b.unit.forward_ms.get(rows, {}).get(context)))
    verdicts_b = {v.kind: v for v in verdicts(b)}
    for v in verdicts(a):
        if (w := verdicts_b.get(v.kind)) is not None:
            out += [
                (f"best draft length on {v.kind}", float(v.draft_tokens), float(w.draft_tokens)),
                (f"expected speed-up on {v.kind}", v.expected, w.expected),
                (f"measured speed-up on {v.kind}", v.measured, w.measured),
            ]
    return [(what, x, y) for what, x, y in out if x is not None and y is not None]


# --- the verdict -----------------------------------------------------------------------------------------------------


def _verdict(m: Measured) -> str:
    found = verdicts(m)
    if not found:
        return verdict(f"No draft length can be recommended: {_why_nothing(m)}", ())
    return verdict(overall(m), [v.finding(m.policy) for v in found], warnings(m))


def _why_nothing(m: Measured) -> str:
    reasons = [f"{what}: {why}" for what, why in m.not_measured.items() if what in ("cost of rows", "acceptance")]
    return "; ".join(reasons) or "nothing was measured"


# --- charts ----------------------------------------------------------------------------------------------------------

Pair = Sequence[tuple[str, Measured]]


def _times(value: float) -> str:
    return f"{value:g}x"


def speed_up_chart(pair: Pair, *, kinds: Sequence[str] | None = None, title: str = "Expected speed-up by draft length") -> str:
    lines: list[Line] = []
    longest = 1
    for label, m in pair:
        chosen = {v.kind: v for v in verdicts(m)}
        for kind, figures in m.kinds.items():
            steps = outlook(m, figures)
            if not steps or (kinds is not None and kind not in kinds):
                continue
            longest = max(longest, len(steps) - 1)
            n = chosen[kind].draft_tokens
            mark = f"{kind}: {n}" if not label else f"{n}"
            lines.append(
                Line(
                    name=label or kind,
                    points=[(step.draft_tokens, step.speed_up) for step in steps],
                    style=len(lines),
                    best=((n, chosen[kind].expected), mark) if n else None,
                )
            )
    lines.append(Line(name="plain decoding", points=[(0, 1.0), (longest, 1.0)], guide=True))
    top = max((y for line in lines for _, y in line.points), default=1.0)
    low = min((y for line in lines for _, y in line.points), default=1.0)
    return chart(
        title,
        Axis(label="draft length (tokens)", low=0, ticks=range(longest + 1)),
        Axis(label="speed against plain", low=max(0.0, min(0.8, low - 0.05)), high=top * 1.12, text=_times),
        lines,
    )


def rows_chart(pair: Pair, *, shortest_only: bool = False) -> str:
    lines: list[Line] = []
    for label, m in pair:
        table = m.unit.forward_ms
        for context in sorted({c for by_context in table.values() for c in by_context})[: 1 if shortest_only else None]:
            one = table.get(1, {}).get(context)
            points = [(float(rows), table[rows][context] / one) for rows in sorted(table) if one and context in table[rows]]
            if points:
                lines.append(Line(name=label or f"context {context}", points=points, style=len(lines)))
    data = [p for line in lines for p in line.points]
    if not data:
        return chart("Cost of rows", Axis(label=""), Axis(label=""), [])
    widest, high = max(p[0] for p in data), max(2.0, max(p[1] for p in data) * 1.15)
    lines += [
        Line(name="rows free", points=[(1, 1), (widest, 1)], guide=True, style=2),
        Line(name="linear", points=[(1, 1), (widest, widest)], guide=True, style=1),
    ]
    rows = sorted({p[0] for p in data})
    return chart(
        "Cost of a pass by rows",
        Axis(label="rows scored in one pass (guesses + 1)", ticks=rows),
        Axis(label="time against one row", low=0.0, high=high, text=_times),
        lines,
    )


def acceptance_chart(pair: Pair) -> str:
    lines: list[Line] = []
    for label, m in pair:
        for kind, figures in m.kinds.items():
            points = [(float(i), alpha) for i, alpha in enumerate(alphas(figures), start=1)]
            lines.append(Line(name=f"{kind}, {label}" if label else kind, points=points, style=len(lines)))
    deepest = max((len(line.points) for line in lines), default=1)
    return chart(
        "Acceptance by position",
        Axis(label="position in the draft", low=1, high=max(2, deepest), ticks=range(1, max(2, deepest) + 1)),
        Axis(label="accepted", low=0.0, high=1.04, ticks=(0, 0.25, 0.5, 0.75, 1), text=lambda v: f"{v:.0%}"),
        lines,
    )


def time_chart(m: Measured) -> str:
    """Every answer a faint mark; the lines join the means of each turn through the kinds of text."""
    lines: list[Line] = []
    for style, mode in enumerate(("plain", "speculative")):
        answers = [a for a in m.sustained if a.mode == mode and a.tok_s > 0]
        n = max(1, len({a.kind for a in answers}))
        turns = [answers[i : i + n] for i in range(0, len(answers) - n + 1, n)]
        means: list[Point] = [(sum(a.at_s for a in turn) / n, n / sum(1 / a.tok_s for a in turn)) for turn in turns]
        lines.append(Line(name=f"{mode}, one answer", points=[(a.at_s, a.tok_s) for a in answers], style=style, joined=False))
        lines.append(Line(name=f"{mode}, mean over kinds", points=means, style=style))
    high = max((y for line in lines for _, y in line.points), default=1.0)
    return chart(
        "Speed over time",
        Axis(label="seconds", low=0),
        Axis(label="tokens per second", low=0, high=high * 1.1),
        [x for x in lines if x.points],
    )


def roof_chart(m: Measured) -> str:
    """Rows scored per second against rows per pass, beside what reading the weights once per pass allows."""
    table, gbs = m.unit.forward_ms, m.unit.bandwidth_gbs
    contexts = sorted({c for by_context in table.values() for c in by_context})
    lines = [
        Line(
            name=f"measured, context {context}",
            points=[(float(rows), rows / table[rows][context] * 1e3) for rows in sorted(table) if context in table[rows]],
            style=i,
        )
        for i, context in enumerate(contexts)
    ]
    if gbs and contexts and m.model.weight_bytes:
        per_pass = gbs * 1e9 / (m.model.weight_bytes + m.model.kv_bytes_per_token * contexts[0])
        lines.append(Line(name=f"memory bound, {gbs:.0f} GB/s", points=[(r, r * per_pass) for r in sorted(table)], guide=True))
    high = max((y for line in lines for _, y in line.points), default=None)
    return chart(
        "Rows per second by rows per pass",
        Axis(label="rows scored in one pass", log=True, ticks=sorted(table)),
        Axis(label="rows per second", log=True, high=high),
        lines,
    )


# --- texts and tables ------------------------------------------------------------------------------------------------


def _time_text(m: Measured) -> str:
    change = drift(m, "plain")
    base = (
        f"Plain and speculative answers in turn (policy {m.policy}). Plain speed shows what heat does; speculative speed also depends on"
        " how much of each answer could be guessed."
    )
    if change is None:
        return base + " Too few answers to tell whether the machine slows down."
    if abs(change.change) <= DRIFT_LIMIT:
        return base + f" Plain speed held: {change.change:+.0%} from the first to the last third."
    return base + f" Plain speed changed by {change.change:+.0%} from the first to the last third: heat, or other work on this machine."


def _roof_text(m: Measured) -> str:
    gbs, one = m.unit.bandwidth_gbs, m.pass_ms(1, 0)
    if not gbs or not one:
        return "Needs the memory bandwidth and the time of one row."
    ceiling = gbs * 1e9 / max(1, m.model.weight_bytes)
    share = 1e3 / one / ceiling
    bound = "so memory sets the pace" if share > 0.6 else "so computing and overhead set the pace, not memory"
    return (
        f"Writing one token reads all {m.model.weight_bytes / 1e6:.0f} MB of weights; at {gbs:.1f} GB/s that allows {ceiling:.0f} tokens"
        f" per second. One row reaches {share:.0%} of it, {bound}. More rows per pass share one reading; where the measured line bends away"
        " from the bound, computing takes over."
    )


def _scheduler_text(m: Measured) -> str:
    return f"What policy {m.policy} did in the sustained phase, round by round, and the last reason it gave."


def _scheduler_table(m: Measured) -> str:
    rows: list[tuple[str, ...]] = []
    for name, kind in m.kinds.items():
        total = sum(kind.planned.values())
        if total:
            common = sorted(kind.planned.items(), key=lambda item: -item[1])[:4]
            rows.append((name, ", ".join(f"{n} tokens in {count / total:.0%}" for n, count in common), kind.reason))
    return tabulate(("kind", "draft lengths it allowed, by share of rounds", "last reason"), rows, numbers=False)


def _kinds_table(m: Measured) -> str:
    rows: list[tuple[str, ...]] = []
    for v in verdicts(m):
        kind = m.kinds[v.kind]
        rows.append(
            (
                v.kind,
                str(v.draft_tokens or "none"),
                f"{v.expected:.2f}x",
                "-" if v.measured is None else f"{v.measured:.2f}x",
                f"{kind.offered[0] / kind.rounds:.0%}" if kind.offered else "-",
                f"{alphas(kind)[0]:.0%}" if kind.tested and kind.tested[0] else "-",
                f"{kind.tested[0] if kind.tested else 0} of {kind.rounds}",
                f"{kind.context:.0f}",
            )
        )
    head = (
        "kind",
        "best length",
        "expected",
        "measured",
        "rounds with a guess",
        "first guess right",
        "first guesses checked, of rounds",
        "context",
    )
    return tabulate(head, rows)


def _rows_table(m: Measured) -> str:
    table, p95 = m.unit.forward_ms, m.unit.forward_p95_ms
    contexts = sorted({c for by_context in table.values() for c in by_context})
    rows = [
        (
            str(rows),
            *(f"{table[rows][c]:.2f} ({p95.get(rows, {}).get(c, table[rows][c]):.2f})" if c in table[rows] else "-" for c in contexts),
        )
        for rows in sorted(table)
    ]
    return tabulate(("rows", *(f"context {c}, ms (95th percentile)" for c in contexts)), rows)


def _engines_table(m: Measured) -> str:
    """Ours at its shortest context beside the others."""
    ours = {rows: by_context[min(by_context)] for rows, by_context in m.unit.forward_ms.items() if by_context and rows in OTHER_ROWS}
    entries = {m.model.engine: (m.model.unit, ours)} | {name: (other.unit, other.forward_ms) for name, other in m.engines.items()}
    if len(entries) < 2:
        return "<p>None was measured.</p>"
    return tabulate(
        ("engine", "unit", *(f"{rows} row{'s' * (rows > 1)}, ms" for rows in OTHER_ROWS)),
        [(name, unit, *(f"{ms[rows]:.2f}" if rows in ms else "-" for rows in OTHER_ROWS)) for name, (unit, ms) in entries.items()],
    )


def _drift_table(m: Measured) -> str:
    rows = [
        (mode, f"{change.first_tok_s:.1f}", f"{change.last_tok_s:.1f}", f"{change.change:+.0%}")
        for mode in ("plain", "speculative")
        if (change := drift(m, mode)) is not None
    ]
    return tabulate(("mode", "first third, tokens/s", "last third, tokens/s", "change"), rows)


def _gains_table(m: Measured) -> str:
    return tabulate(
        ("kind", "speculative over plain"), [(kind, f"{value:.2f}x") for kind in m.kinds if (value := gain(m, kind)) is not None]
    )


def _facts_table(m: Measured) -> str:
    d, u = m.draft, m.unit
    error = m.prediction_error
    facts: dict[str, str | float | None] = {
        "processor": m.machine.processor,
        "system": m.machine.system or None,
        "physical cores": str(m.machine.cores),
        "memory": m.machine.memory_bytes and f"{m.machine.memory_bytes / 2**30:.1f} GiB",
        "load before the run (one-minute mean)": _number(m.machine.load_before),
        "model": f"{m.model.name} on {m.model.engine} ({m.model.unit}), {m.model.weight_bytes / 1e6:.0f} MB of weights",
        "where the model's work runs": m.model.placement and m.model.placement.describe(),
        "draft": d.name + (f" ({d.unit})" if d.unit else ""),
        "where the draft's work runs": d.placement and d.placement.describe(),
        "memory bandwidth": u.bandwidth_gbs and f"{u.bandwidth_gbs:.1f} GB/s",
        "smallest pass": u.dispatch_floor_ms and f"{u.dispatch_floor_ms:.2f} ms (dispatching takes less than this)",
        "draft cost": None if d.ms_per_token is None else f"{d.ms_per_token:.4g} ms per token",
        "draft cost with nothing to guess": None if d.miss_ms is None else f"{d.miss_ms:.4g} ms",
        "rest of a round": None if m.other_ms is None else f"{m.other_ms:.4g} ms (planning, judging, committing, text)",
        "slow-down of the target while the draft works beside it": m.overlap_penalty and f"{m.overlap_penalty:.2f}x",
        "energy": ", ".join(f"{mode} {mj:.0f} mJ per token" for mode, mj in m.energy_mj_per_token.items()) or None,
        "rounds predicted by these figures": None if error is None else f"within {error:.0%} (median, on the sustained phase)",
        "hot samples, counted but not used": str(m.hot_samples),
        "complete": "yes" if m.complete else "no",
        "provenance": m.device().provenance,
    }
    return tabulate(("", ""), [(key, str(value)) for key, value in facts.items() if value], numbers=False)


def _missing_table(m: Measured) -> str:
    if not m.not_measured:
        return "<p>Everything was measured.</p>"
    return tabulate(("what", "why"), list(m.not_measured.items()), numbers=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}" if a else "-"
