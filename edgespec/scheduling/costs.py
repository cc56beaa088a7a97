"""What a round costs, learnt from rounds: target time by rows scored, drafter time by nodes drafted, both when drafting ahead."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

PACE_RATE = 0.08  # share of what a sample is off by that all widths have in common …
FRESH_DOUBT = 0.5  # … the first time in an answer, falling from sample to sample to the former …
OWN_RATE, LOOK_RATE = 0.02, 0.25  # … and what the width itself takes of the rest, once it is known, and if it was long out of use
SPIKE = 1.25  # a sample this far off counts for nothing …
BELIEVED = 3  # … until so many say that the level has changed
STALE = 20  # samples of other widths after which a width is out of use
STALE_TRUST = 2.0  # a first new sample may move it by this factor at most,
AS_KNOWN = 1.15  # a look within this factor of the estimate confirms it
MOST_CONFIRMED = 5
SIGHTINGS = 9  # of a disturbance that count; the assumption counts as one
FORGOTTEN = 100  # rounds undisturbed after which the assumption stands alone again


@dataclass(slots=True)
class _Width:
    ms: float
    seen: int  # the book's sample count when this width was last sampled
    pace: float  # the book's pace when this width was last known from its own samples
    samples: int = 0
    confirmed: int = 0  # looks in a row, each after a while without, that found what was known
    recent: list[float] = field(default_factory=list[float])


class RowCosts:
    """Milliseconds by rows scored: an average per width that ignores lone spikes, over a prior shape between the widths.

    All widths share a pace, which every sample corrects a little: a device that is slowed by heat or load, or by a longer context,
    is slower at every width. What a width costs at that pace is its own, and learnt slowly. A jump of one width is taken for its own
    as well: those in use will soon show whether they jumped too, and only those out of use follow it, by its share of what is in use.
    With a new answer nothing is in use yet, so that all follow the first that jumps.
    """

    def __init__(self) -> None:
        self._widths: dict[int, _Width] = {}
        self._known: list[int] = []  # rows of the widths, in order
        self._seen = 0
        self._pace = 0.0  # logarithm of how much slower everything has become
        self._doubt = FRESH_DOUBT  # share of what a sample is off by that is taken for the pace's
        self._began = 0  # the sample count when the present answer began
        self._moved = 0  # the sample count at the last jump of a width in use

    def copy(self) -> RowCosts:
        """A separate book that starts from these figures."""
        twin = RowCosts()
        twin._widths = {rows: replace(width, recent=list(width.recent)) for rows, width in self._widths.items()}
        twin._known, twin._seen, twin._pace, twin._moved = list(self._known), self._seen, self._pace, self._moved
        twin._doubt, twin._began = self._doubt, self._began
        return twin

    @property
    def seen(self) -> int:
        """Samples of all widths."""
        return self._seen

    def samples(self, rows: int) -> int:
        width = self._widths.get(rows)
        return width.samples if width else 0

    def ms(self, rows: int) -> float | None:
        """The present estimate of a measured width, or None."""
        width = self._widths.get(rows)
        return self._present(width) if width else None

    def age(self, rows: int) -> float:
        """Samples of any width since this one was seen; infinite if it never was."""
        width = self._widths.get(rows)
        return self._seen - width.seen if width else math.inf

    def confirmed(self, rows: int) -> int:
        """How many looks in a row found this width as it was known."""
        width = self._widths.get(rows)
        return width.confirmed if width else 0

    def outdated(self, rows: int) -> bool:
        """Measured, but not since a width in use jumped: its estimate is that of another machine, scaled."""
        width = self._widths.get(rows)
        return width is not None and width.seen < self._moved

    def observe(self, rows: int, ms: float) -> None:
        if not math.isfinite(ms) or ms <= 0:
            return
        self._seen += 1
        width = self._widths.get(rows)
        if width is None:
            ms = min(ms, SPIKE * self._foreseen(rows))  # the first pass of a width is often slow: memory is fetched for it
            width = self._widths[rows] = _Width(ms, self._seen, self._pace)
            insort(self._known, rows)
        before = self._present(width)
        if self._seen - width.seen > STALE:
            as_known = before / AS_KNOWN < ms < before * AS_KNOWN
            width.confirmed = min(width.confirmed + 1, MOST_CONFIRMED) if as_known else 0
            if width.samples <= BELIEVED:
                width.recent = []
            rate = LOOK_RATE
        else:
            rate = max(OWN_RATE, 1.0 / (width.samples + 1))
        width.recent = [*width.recent[1 - BELIEVED :], ms * math.exp(-self._pace)]
        width.seen = self._seen
        width.samples += 1
        pace = math.exp(self._pace)
        recent = [*(each * pace for each in width.recent[:-1]), ms]
        if len(recent) < BELIEVED:
            width.ms, width.pace = _first(before, recent, width.samples), self._pace
        elif min(recent) > before * SPIKE:  # a rise must repeat itself: disturbances come in twos
            self._jump(width, before, min(recent))
        elif median(recent) < before / SPIKE:
            self._jump(width, before, median(recent))
        elif before / SPIKE < ms < before * SPIKE:
            off = math.log(ms / before)
            self._pace += self._doubt * off
            width.ms, width.pace = before * math.exp((self._doubt + (1.0 - self._doubt) * rate) * off), self._pace
            self._doubt = max(PACE_RATE, self._doubt / (1.0 + self._doubt))

    def begin(self) -> None:
        """Another answer: at another context length, and perhaps hours later, all widths may have another pace."""
        self._doubt = max(self._doubt, FRESH_DOUBT)
        self._began = self._seen + 1

    def _jump(self, width: _Width, before: float, ms: float) -> None:
        """One width has another level."""
        since = max(self._began, self._seen - STALE)
        in_use = [other for other in self._widths.values() if other.seen >= since]
        for other in in_use:
            other.ms = self._present(other)
        width.ms = ms
        self._pace += math.log(ms / before) / len(in_use)
        for other in in_use:
            other.pace = self._pace
        self._moved = self._seen
        for other in self._widths.values():
            other.confirmed = 0

    def skip(self) -> None:
        """A disturbed pass: it says nothing of what rows cost, but all that is known is one pass older."""
        self._seen += 1

    def _foreseen(self, rows: int) -> float:
        """On the line through the two nearest widths that were seen twice, and no less than the wider one beyond both.

        Infinite below both and where there are no two.
        """
        near = sorted((m for m in self._known if self._widths[m].samples > 1), key=lambda m: abs(m - rows))[:2]
        if len(near) < 2 or rows < min(near):
            return math.inf
        below, above = sorted(near)
        at_below, at_above = self._present(self._widths[below]), self._present(self._widths[above])
        on_line = at_below + (rows - below) / (above - below) * (at_above - at_below)
        return on_line if rows < above else max(at_below, at_above, on_line)

    def _present(self, width: _Width) -> float:
        return width.ms if width.pace == self._pace else width.ms * math.exp(self._pace - width.pace)

    def curve(self, shape: Sequence[float], rows: int | None = None) -> list[float]:
        """ms for 1..rows rows (default: as many as the shape has); `shape[m-1]` is the assumed v(m), corrected where widths were measured.

        The correction is linear between measured widths. A width beyond the shape is compared with the shape's last value.
        """
        rows = len(shape) if rows is None else rows
        if not self._known:
            return list(shape[:rows])
        out: list[float] = []
        at, left = 0, self._known[0]
        right, left_factor, right_factor = left, 0.0, self._factor(left, shape)
        for m in range(1, rows + 1):
            while right < m and at + 1 < len(self._known):
                at, left, left_factor = at + 1, right, right_factor
                right = self._known[at]
                right_factor = self._factor(right, shape)
            if left < m < right:
                out.append(shape[m - 1] * (left_factor + (m - left) / (right - left) * (right_factor - left_factor)))
            else:
                out.append(shape[m - 1] * right_factor)
        return out

    def _factor(self, rows: int, shape: Sequence[float]) -> float:
        return self._present(self._widths[rows]) / shape[min(rows, len(shape)) - 1]


def _first(before: float, recent: Sequence[float], samples: int) -> float:
    """The level of a width that was seen seldom: the least of what was seen, first runs being slow for reasons of their own."""
    most = STALE_TRUST if samples <= BELIEVED else SPIKE
    return min(max(min(recent), before / STALE_TRUST), before * most)


FORGET = 0.95  # per drafting round


class Disturbance:
    """The factor on a cost in the rounds that draft ahead: the median of what was seen lately, with an assumption behind it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=SIGHTINGS)
        self._undisturbed = 0

    def observe(self, factor: float) -> None:
        if math.isfinite(factor) and factor > 0:
            self._recent.append(factor)
            self._undisturbed = 0

    def rest(self) -> None:
        """A round without. After many, what was seen counts no more, so that a bad time is not held against it for ever."""
        self._undisturbed += 1
        if self._undisturbed >= FORGOTTEN:
            self._recent.clear()

    def factor(self, assumed: float) -> float:
        n = len(self._recent)
        return (n * median(self._recent) + assumed) / (n + 1) if n else assumed


def ahead_ms(row_ms: float, draft_ms: float, node_ms: float, *, factor: float, foreseen: float) -> float:
    """A round in which the next draft is made while the target verifies, `foreseen` being the chance that it can be used.

    It is one node longer, for the token foreseen. Both models are taken to be slowed by `factor`. What was not foreseen costs
    the draft after all, and half a node's time until the worker has stopped.
    """
    beside_ms = row_ms * factor
    wait_ms = max(0.0, (draft_ms + node_ms) * factor - beside_ms)
    return beside_ms + foreseen * wait_ms + (1.0 - foreseen) * (draft_ms + 0.5 * node_ms)


class DraftCosts:
    """Drafter milliseconds as d0 + d1·n for n nodes: least squares with forgetting, lone spikes cut."""

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._ms = self._nms = 0.0
        self._samples = self._spikes = 0
        self.line = (0.0, 0.0)

    @property
    def known(self) -> bool:
        return self._samples > 0

    def observe(self, nodes: int, ms: float) -> None:
        if not math.isfinite(ms) or ms < 0:
            return
        expected = self.ms(nodes)
        if self._samples >= BELIEVED and abs(ms - expected) > (SPIKE - 1.0) * expected + 0.02:
            self._spikes += 1
            if self._spikes < BELIEVED:
                return
            self._weight = self._n = self._nn = self._ms = self._nms = 0.0
        self._spikes = 0
        self._samples += 1
        self._weight = FORGET * self._weight + 1
        self._n = FORGET * self._n + nodes
        self._nn = FORGET * self._nn + nodes * nodes
        self._ms = FORGET * self._ms + ms
        self._nms = FORGET * self._nms + nodes * ms
        weight = self._weight + 1.0  # one pseudo-round says that the line passes through zero
        slope = (weight * self._nms - self._n * self._ms) / (weight * self._nn - self._n * self._n)
        slope = max(0.0, slope)
        self.line = (max(0.0, (self._ms - slope * self._n) / weight), slope)

    def ms(self, nodes: float) -> float:
        return self.line[0] + self.line[1] * nodes
