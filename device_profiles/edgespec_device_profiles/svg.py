"""Line charts as inline SVG: axes, legend, marks that differ in more than colour. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 46
LEGEND_ROW = 20
MARK_ROOM = 6  # around the frame, so that marks on its edge are seen whole
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
STYLES = len(DASHES)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`style` picks colour, dash and mark. `guide`: a thin grey line to compare with. `best`: (point, label) to point out."""

    name: str
    points: Sequence[Point]
    style: int = 0
    guide: bool = False
    joined: bool = True
    best: tuple[Point, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`low` and `high` default to what the data needs; `log` needs positive data."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    ticks: Sequence[float] = ()
    text: Callable[[float], str] = lambda value: f"{value:g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float  # pixels
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """An <svg> element; guides may leave the frame, data never does unless an axis says so."""
    data = [p for line in lines if not line.guide for p in line.points]
    if not data:
        return '<p class="empty">Nothing measured.</p>'
    named = [line for line in lines if line.name]
    legend, rows = _legend(named)
    bottom = HEIGHT - BOTTOM
    x_scale = _scale(x, [p[0] for p in data], LEFT, WIDTH - RIGHT)
    y_scale = _scale(y, [p[1] for p in data], bottom, TOP)
    height = HEIGHT + rows * LEGEND_ROW
    frame = (
        f'<rect x="{LEFT - MARK_ROOM}" y="{TOP - MARK_ROOM}" width="{WIDTH - RIGHT - LEFT + 2 * MARK_ROOM}"'
        f' height="{bottom - TOP + 2 * MARK_ROOM}"/>'
    )
    clip = "clip-" + "".join(c if c.isalnum() else "-" for c in title)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
        f'<clipPath id="{clip}">{frame}</clipPath>',
        _axes(x, y, x_scale, y_scale, bottom),
        f'<g clip-path="url(#{clip})">',
        *(_line(line, x_scale, y_scale) for line in sorted(lines, key=lambda line: not line.guide)),
        "</g>",
        *_labels([line for line in lines if line.best], x_scale, y_scale),
        f'<g transform="translate({LEFT} {HEIGHT})">{legend}</g>',
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low = axis.low if axis.low is not None else min(values)
    high = axis.high if axis.high is not None else max(values)
    if low >= high:
        low, high = (low / 2, low * 2) if axis.log else (low - 1.0, low + 1.0)
    return _Scale(low, high, start, end, axis.log)


def ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    """Round numbers within low..high: steps of 1, 2 or 5, or with `log` 1-2-5 per decade."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(x: Axis, y: Axis, x_scale: _Scale, y_scale: _Scale, bottom: float) -> str:
    out: list[str] = []
    right = WIDTH - RIGHT
    for value in y.ticks or ticks(y_scale.low, y_scale.high, log=y.log):
        at = y_scale(value)
        out.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y.text(value))}</text>')
    for value in x.ticks or ticks(x_scale.low, x_scale.high, log=x.log):
        if x_scale.low <= value <= x_scale.high:
            at = x_scale(value)
            out.append(f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}"/>')
            out.append(f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(x.text(value))}</text>')
    middle = (TOP + bottom) / 2
    out.append(f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    out.append(f'<text class="label" x="{(LEFT + right) / 2}" y="{bottom + 38}" text-anchor="middle">{escape(x.label)}</text>')
    out.append(f'<text class="label" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>')
    return "\n".join(out)


def _line(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    at = [(x_scale(px), y_scale(py)) for px, py in line.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in at)
    if line.guide:
        return f'<polyline class="guide" points="{path}"{_dash(line)}/>'
    style = line.style % STYLES
    out = [f'<polyline class="line s{style}" points="{path}"{_dash(line)}/>'] if line.joined else []
    for (px, py), (vx, vy) in zip(at, line.points, strict=True):
        tip = f"<title>{escape(line.name)}: {vx:.4g}, {vy:.4g}</title>"
        out.append(f'<g class="mark s{style}{"" if line.joined else " faint"}">{_mark(style, px, py)}{tip}</g>')
    return "\n".join(out)


def _dash(line: Line) -> str:
    dash = DASHES[line.style % STYLES]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _mark(style: int, x: float, y: float) -> str:
    r = 3.4
    corners = {
        1: ((-r, -r), (r, -r), (r, r), (-r, r)),
        2: ((0, -r - 1), (r + 1, r), (-r - 1, r)),
        3: ((0, -r - 1.2), (r + 1.2, 0), (0, r + 1.2), (-r - 1.2, 0)),
        4: ((-r - 1, -r), (r + 1, -r), (0, r + 1)),
    }.get(style)
    if corners is None:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


LABEL_STEP = 15.0


def _labels(lines: Sequence[Line], x_scale: _Scale, y_scale: _Scale) -> list[str]:
    """Rings around the points to be seen, their labels moved apart."""
    out: list[str] = []
    taken: list[Point] = []
    for line in lines:
        assert line.best is not None
        (vx, vy), text = line.best
        px, py = x_scale(vx), y_scale(vy)
        ty = py - 10
        while any(abs(ty - other_y) < LABEL_STEP and abs(px - other_x) < 7.0 * len(text) for other_x, other_y in taken) and ty > TOP + 12:
            ty -= LABEL_STEP
        taken.append((px, ty))
        near_right = px > WIDTH - RIGHT - 4.0 * len(text)
        anchor = "end" if near_right else "middle" if px > LEFT + 3.5 * len(text) else "start"
        style = line.style % STYLES
        out.append(f'<circle class="ring s{style}" cx="{px:.1f}" cy="{py:.1f}" r="8"/>')
        out.append(f'<text class="best s{style}" x="{px:.1f}" y="{max(TOP + 10, ty):.1f}" text-anchor="{anchor}">{escape(text)}</text>')
    return out


def _legend(lines: Sequence[Line]) -> tuple[str, int]:
    """Entries in rows, and how many rows they take."""
    out: list[str] = []
    x, row = 0.0, 0
    for line in lines:
        width = 52 + 6.6 * len(line.name)
        if x + width > WIDTH - LEFT - RIGHT and x > 0:
            x, row = 0.0, row + 1
        y = row * LEGEND_ROW + 6
        style = line.style % STYLES
        kind = "guide" if line.guide else f"line s{style}"
        if line.joined:
            out.append(f'<line class="{kind}" x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}"{_dash(line)}/>')
        if not line.guide:
            out.append(f'<g class="mark s{style}{"" if line.joined else " faint"}">{_mark(style, x + 13, y)}</g>')
        out.append(f'<text class="tick" x="{x + 32}" y="{y + 4}">{escape(line.name)}</text>')
        x += width
    return "".join(out), row + 1 if lines else 0
