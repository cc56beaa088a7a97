"""A profiling run: what a machine takes to run a model and its draft, found out by running them.

The run goes from the figures that everything rests on to those that are nice to know, so that it may be stopped at any time:
`Profiler.run` returns what it has. Every loop is over interleaved samples, so that a slow spell of the machine hits all figures
alike, and every figure is a median. Samples from a device that is not cool are counted but never used.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import cycle
from statistics import median

from edgespec.core.cancel import CancelToken
from edgespec.core.chunk import Chunk
from edgespec.core.device import PowerThermalState, UnitProfile
from edgespec.core.engine import Cache, Engine, TokenBatch
from edgespec.core.errors import Cancelled, EdgespecError
from edgespec.core.placement import UNKNOWN, Placement, placement_of
from edgespec.core.plan import Knobs
from edgespec.core.trace import RoundTrace
from edgespec.orchestrator.runtime import Runtime
from edgespec_device_profiles.measured import OTHER_CONTEXT, OTHER_ROWS, Answer, DraftCost, Elsewhere, Kind, Machine, Measured, Model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXTS = (64, 512, 2048)
QUICK_CONTEXTS = (64, 512)
LEAST_SWEEPS, MOST_SWEEPS = 3, 40
PREFILL_ROWS = 256
FLOOR_PASSES = 12
OTHER_TURNS = 5  # passes of each width on another engine
OVERLAP_TURNS, OVERLAP_PASSES = 3, 4
DEEPEST_GUESS = {"ngram": 15}  # tokens; a model pays for each of them
DEEPEST_MODEL_GUESS = 8
SHARES = {"cost of rows": 0.3, "two units at once": 0.05, "other engines": 0.05, "acceptance": 0.3, "speed over time": 0.3}  # of the time
ACCEPTANCE_TOKENS = 128  # per answer: the rounds at its end, which have no room for a long draft, tell nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`seconds` is aimed at, not promised: every stage does the least that gives a figure. `max_tokens` per answer over time.

    `contexts` and answers that would pass `max_context`, or the model's own limit, are left out or cut.
    """

    seconds: float
    contexts: Sequence[int] = CONTEXTS
    rows: Sequence[int] = ROWS
    max_tokens: int = 96
    policy: str = "adaptive"
    verify: str = "auto"
    knobs: Knobs = field(default_factory=Knobs)  # of the speculative answers
    max_context: int | None = None


@dataclass(slots=True)
class Samples:
    """Milliseconds of one thing, cool and hot apart."""

    cool: list[float] = field(default_factory=list[float])
    hot: int = 0

    @property
    def p95(self) -> float:
        return sorted(self.cool)[math.ceil(0.95 * len(self.cool)) - 1]


Cell = tuple[int, int]  # (rows, context)


class Profiler:
    """One run. `others` load the same model on other engines, by name. `prompts`: token ids by kind of text.
    `bandwidth` measures GB/s; `power` reads heat (default: the runtime's sensors).

    Nothing here waits: with `clock` faked, a run is as fast as the engines are.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        *,
        machine: Machine,
        settings: Settings,
        bandwidth: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        power: Callable[[], PowerThermalState | None] | None = None,
        others: Mapping[str, Callable[[], Runtime]] | None = None,
        cancel: CancelToken | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self._runtime, self._prompts, self._settings = runtime, prompts, settings
        self._machine, self._bandwidth, self._clock, self._now = machine, bandwidth, clock, now
        self._draft_name = runtime.drafts[0]  # a profile is about one drafter
        self._power, self._meter_mj = power or runtime.power, runtime.meter_mj
        self._others = others or {}
        self._cancel, self._progress = cancel or CancelToken(), progress
        self._began = clock()
        self._date = now().isoformat(timespec="seconds")
        self._complete = False
        self._placement: Placement | None = None
        self._draft_placement: Placement | None = None
        self._gbs: float | None = None
        self._target: dict[Cell, Samples] = defaultdict(Samples)
        self._draft: dict[Cell, Samples] = defaultdict(Samples)
        self._floor_ms: float | None = None
        self._overlap: float | None = None
        self._engines: dict[str, Elsewhere] = {}
        self._rounds: dict[str, list[RoundTrace]] = defaultdict(list)  # of the acceptance stage, by kind
        self._policy_rounds: dict[str, list[RoundTrace]] = defaultdict(list)
        self._cool_rounds: list[RoundTrace] = []
        self._answers: list[Answer] = []
        self._energy: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # mode -> mJ, tokens, ms
        self._hot = 0
        self._missing: dict[str, str] = {}

    def run(self) -> Measured:
        """All stages, or as many as there was time for before `cancel` was set. A stage that fails says so in the result."""
        stages: dict[str, Callable[[], None]] = {
            "where the work runs": self._find_placement,
            "memory bandwidth": self._measure_bandwidth,
            "cost of rows": self._measure_rows,
            "smallest pass": self._measure_floor,
            "acceptance": self._measure_acceptance,
            "two units at once": self._measure_overlap,
            "other engines": self._measure_others,
            "speed over time": self._measure_sustained,
        }
        self._missing = dict.fromkeys(stages, "interrupted before its turn")
        try:
            for name, stage in stages.items():
                self._cancel.check()
                self._progress(name, 0, 1)
                self._missing[name] = "interrupted: what there was until then is kept"
                try:
                    stage()
                    self._missing.pop(name, None)
                except Cancelled:
                    raise
                except EdgespecError as error:
                    self._missing[name] = f"failed: {error}"
                except _NotHere as reason:
                    self._missing[name] = str(reason)
                self._progress(name, 1, 1)
            self._complete = not any(why.startswith("failed") for why in self._missing.values())
        except Cancelled:
            pass
        return self.result()

    def result(self) -> Measured:
        """What is known so far."""
        spec, label = self._runtime.target.spec, self._placement.label if self._placement else UNKNOWN
        known = {cell: samples for cell, samples in self._target.items() if samples.cool}
        energy = {mode: mj / tokens for mode, (mj, tokens, _) in self._energy.items() if tokens}
        busy_ms = sum(ms for _, _, ms in self._energy.values())
        unit = UnitProfile(
            bandwidth_gbs=self._gbs,
            forward_ms=_nested({cell: median(samples.cool) for cell, samples in known.items()}),
            forward_p95_ms=_nested({cell: samples.p95 for cell, samples in known.items()}),
            busy_w=sum(mj for mj, _, _ in self._energy.values()) / busy_ms if energy else None,
            dispatch_floor_ms=self._floor_ms,
        )
        missing = dict(self._missing)
        if self._meter_mj is None:
            missing["energy"] = "no meter that could be read on this machine"
        if self._hot and not known:
            missing["cost of rows"] = "the device was hot throughout: let it cool and measure again"
        measured = Measured(
            date=self._date,
            complete=self._complete and bool(known),
            machine=self._machine,
            model=Model(
                name=spec.name,
                engine=self._runtime.engine_name,
                unit=label,
                weight_bytes=spec.weight_bytes,
                kv_bytes_per_token=spec.kv_bytes_per_token,
                placement=self._placement,
            ),
            draft=self._draft_cost(),
            policy=self._settings.policy,
            units={label: unit},
            engines=self._engines,
            overlap_penalty=self._overlap,
            other_ms=_median(t.round_ms + t.text_ms - t.verify_ms - t.draft_ms for t in self._cool_rounds),
            energy_mj_per_token=energy,
            hot_samples=self._hot,
            kinds={kind: self._kind(kind) for kind in self._prompts if self._rounds[kind]},
            sustained=tuple(self._answers),
            not_measured=missing,
        )
        return replace(measured, prediction_error=self._prediction_error(measured))

    # --- the stages

    def _find_placement(self) -> None:
        """Found out, not taken from what the engines were asked for."""
        draft = self._runtime.draft_engine
        self._placement = placement_of(self._runtime.target)
        self._draft_placement = placement_of(draft) if draft else None
        if self._placement is None or (draft and self._draft_placement is None):
            raise _NotHere("an engine of these cannot tell")

    def _measure_bandwidth(self) -> None:
        self._gbs = self._bandwidth()

    def _measure_rows(self) -> None:
        """Every (rows, context) once per sweep, forwards and backwards in turn; the first pass of each warms up and is dropped."""
        target, draft = self._runtime.target, self._runtime.draft_engine
        benches = {context: _Bench(target, context, self) for context in self._fitting_contexts(target)}
        drafts = {context: _Bench(draft, context, self) for context in self._fitting_contexts(draft)} if draft else {}
        jobs = [(benches[context], rows, self._target[rows, context]) for rows in self._fitting_rows() for context in benches]
        jobs += [(bench, 1, self._draft[1, context]) for context, bench in drafts.items()]
        for bench, rows, _ in jobs:
            bench.pass_ms(rows)
        for sweep in self._until("cost of rows"):
            for bench, rows, samples in jobs if sweep % 2 == 0 else jobs[::-1]:
                self._sample(samples, bench.pass_ms(rows))
            if sweep + 1 >= MOST_SWEEPS:
                return

    def _measure_floor(self) -> None:
        """The fastest pass there is: one row of the smallest model after one token. It bounds the cost of a dispatch from above."""
        engine = self._runtime.draft_engine or self._runtime.target
        bench = _Bench(engine, 1, self)
        self._floor_ms = min(bench.pass_ms(1) for _ in range(FLOOR_PASSES))

    def _measure_overlap(self) -> None:
        """The target's pass while the draft model works on another thread, against the same pass alone; in turns."""
        draft = self._runtime.draft_engine
        if draft is None:
            raise _NotHere("this draft runs no second model")
        target_bench, draft_bench = (_Bench(e, min(64, e.spec.max_context - 1), self) for e in (self._runtime.target, draft))
        alone, beside = Samples(), Samples()
        for bench in (draft_bench, target_bench):  # warm up
            bench.pass_ms(1)
        for turn in self._until("two units at once"):
            for _ in range(OVERLAP_PASSES):
                self._sample(alone, target_bench.pass_ms(1))
            with _repeating(lambda: draft_bench.pass_ms(1)):
                for _ in range(OVERLAP_PASSES):
                    self._sample(beside, target_bench.pass_ms(1))
            if turn + 1 >= OVERLAP_TURNS:
                break
        if alone.cool and beside.cool:
            self._overlap = median(beside.cool) / median(alone.cool)

    def _measure_others(self) -> None:
        """What else could run this model, a few widths each; one that is slow gets fewer. One engine is in memory at a time beside ours."""
        if not self._others:
            raise _NotHere("no other engine here runs this model")
        failed: dict[str, str] = {}
        for name, load in self._others.items():
            self._cancel.check()
            try:
                with load() as runtime:
                    self._engines[name] = self._elsewhere(runtime.target)
            except Cancelled:
                raise
            except EdgespecError as error:
                failed[name] = str(error)
        if failed:
            raise _NotHere("; ".join(f"{name}: {why}" for name, why in failed.items()))

    def _elsewhere(self, engine: Engine) -> Elsewhere:
        began, budget_s = self._clock(), SHARES["other engines"] * self._settings.seconds / len(self._others)
        bench = _Bench(engine, OTHER_CONTEXT, self)
        ms: dict[int, list[float]] = defaultdict(list)
        rows = [m for m in OTHER_ROWS if m <= engine.capabilities.max_rows]
        bench.pass_ms(1)  # warms up
        for m in [*rows, *rows * (OTHER_TURNS - 1)]:
            if ms and self._clock() - began > budget_s:
                break
            ms[m].append(bench.pass_ms(m))
        placement = placement_of(engine)
        return Elsewhere(unit=placement.label if placement else UNKNOWN, forward_ms={m: median(times) for m, times in ms.items()})

    def _measure_acceptance(self) -> None:
        """Long drafts on real prompts, kinds in turn."""
        if self._draft_name == "none":
            raise _NotHere("nothing is drafted")
        deepest = min(DEEPEST_GUESS.get(self._draft_name, DEEPEST_MODEL_GUESS), self._settings.knobs.max_draft_tokens)
        queue = [(kind, ids) for turn in _turns(self._prompts) for kind, ids in turn]
        for n in self._until("acceptance", least=2 * len(self._prompts)):
            if n >= len(queue):
                return
            kind, ids = queue[n]
            left = min(ACCEPTANCE_TOKENS, self._limit - len(ids))
            for t in self._answer(ids, f"fixed:{deepest}", max_tokens=left).traces[:-1]:  # a stop cuts the last one short
                if left > deepest:
                    self._rounds[kind].append(t)
                left -= t.emitted

    def _measure_sustained(self) -> None:
        """Plain and speculative answers in turn for the rest of the time: what the gain is in earnest, and what heat takes away."""
        began = self._clock()
        kinds = list(self._prompts.items())
        for n in self._until("speed over time", least=2 * len(kinds)):
            turn, (kind, prompts) = n // len(kinds), kinds[n % len(kinds)]
            for mode, policy in (("plain", "fixed:0"), ("speculative", self._settings.policy)):
                answer = self._answer(prompts[turn % len(prompts)], policy, mode, max_tokens=self._settings.max_tokens)
                if mode == "speculative":
                    self._policy_rounds[kind] += answer.traces[:-1]  # the last round of an answer leaves no choice
                state = answer.power
                self._answers.append(
                    Answer(
                        at_s=self._clock() - began,
                        kind=kind,
                        mode=mode,
                        tok_s=answer.tok_s,
                        thermal=state.thermal if state else None,
                        temperature_c=state.temperature_c if state else None,
                    )
                )

    # --- helpers

    def _answer(self, prompt: Sequence[int], policy: str, mode: str = "", *, max_tokens: int) -> _Answered:
        """One greedy answer in a fresh session. A cancelled one raises; its rounds are lost."""
        room = min(self._limit, len(prompt) + max_tokens + 1)
        mj = self._meter_mj() if self._meter_mj and mode else None
        cancel = CancelToken()  # a session cancels its token when it closes, so it gets one of its own
        chunks: list[Chunk] = []
        at_s: list[float] = []
        knobs = self._settings.knobs if mode == "speculative" else None
        session = self._runtime.session(policy=policy, verify=self._settings.verify, max_context=room, knobs=knobs, draft=self._draft_name)
        with session, self._cancel.watch(cancel.cancel):
            for chunk in session.stream(list(prompt), max_tokens=max_tokens, cancel=cancel):
                chunks.append(chunk)
                at_s.append(self._clock())
        self._cancel.check()
        state = self._power()
        traces = [chunk.trace for chunk in chunks if chunk.trace is not None]
        if _cool(state):
            self._cool_rounds += traces
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if mj is not None and self._meter_mj:
            used = self._energy[mode]
            for i, amount in enumerate((self._meter_mj() - mj, tokens, sum(t.round_ms + t.text_ms for t in traces))):
                used[i] += amount
        seconds = at_s[-1] - at_s[0]
        tok_s = (tokens - len(chunks[0].token_ids)) / seconds if seconds > 0 else 0.0
        return _Answered(traces, tok_s, state)

    def _sample(self, samples: Samples, ms: float) -> None:
        self._cancel.check()
        if _cool(self._power()):
            samples.cool.append(ms)
        else:
            samples.hot += 1
            self._hot += 1

    def _until(self, stage: str, least: int = LEAST_SWEEPS) -> Iterator[int]:
        """0, 1, 2, … at least `least` times and then until the stage's share of the time is used up."""
        share_s = SHARES[stage] * self._settings.seconds
        began = self._clock()
        n = 0
        while n < least or self._clock() - began < share_s:
            self._cancel.check()
            yield n
            n += 1
            spent = (self._clock() - began) / share_s
            self._progress(stage, min(99, round(100 * max(spent, n / least if n < least else spent))), 100)

    def _fitting_contexts(self, engine: Engine) -> list[int]:
        longest = min(self._limit, engine.spec.max_context) - max(self._fitting_rows())
        return [c for c in self._settings.contexts if c <= longest] or [max(1, longest // 2)]

    def _fitting_rows(self) -> list[int]:
        capabilities = self._runtime.target.capabilities
        return [m for m in self._settings.rows if m <= min(capabilities.max_rows, self._limit // 2)]

    @property
    def _limit(self) -> int:
        return min(self._runtime.spec.max_context, self._settings.max_context or self._runtime.spec.max_context)

    def _draft_cost(self) -> DraftCost:
        rounds = [t for traces in self._rounds.values() for t in traces]
        engine = self._runtime.draft_engine
        return DraftCost(
            name=self._draft_name,
            unit=(self._draft_placement.label if self._draft_placement else UNKNOWN) if engine else "",
            ms_per_token=_median(t.draft_ms / t.drafted for t in rounds if t.drafted),
            miss_ms=_median(t.draft_ms for t in rounds if not t.drafted),
            forward_ms={context: median(samples.cool) for (_, context), samples in self._draft.items() if samples.cool},
            placement=self._draft_placement,
        )

    def _kind(self, kind: str) -> Kind:
        rounds, chosen = self._rounds[kind], self._policy_rounds[kind]
        deepest = max(t.planned for t in rounds)
        depths = range(1, deepest + 1)
        planned: dict[int, int] = defaultdict(int)
        for t in chosen:
            planned[t.planned] += 1
        return Kind(
            rounds=len(rounds),
            offered=tuple(sum(t.drafted >= k for t in rounds) for k in depths),
            tested=tuple(sum(t.drafted >= k and t.kept >= k - 1 for t in rounds) for k in depths),
            kept=tuple(sum(t.kept >= k for t in rounds) for k in depths),
            context=sum(t.context_len for t in rounds) / len(rounds),
            planned=dict(sorted(planned.items())),
            reason=chosen[-1].reason if chosen else "",
        )

    def _prediction_error(self, measured: Measured) -> float | None:
        """On rounds that were not used for the table; without them it would only say how well the table knows itself."""
        errors: list[float] = []
        for t in (t for traces in self._policy_rounds.values() for t in traces):
            expected = measured.round_ms(t.rows, t.context_len, t.drafted)
            if expected is not None and t.round_ms > 0:
                errors.append(abs(expected / (t.round_ms + t.text_ms) - 1.0))
        return median(errors) if errors else None


@dataclass(frozen=True, slots=True)
class _Answered:
    traces: list[RoundTrace]
    tok_s: float
    power: PowerThermalState | None


class _NotHere(Exception):
    """A stage that makes no sense with these models; the message says why."""


class _Bench:
    """One engine with a cache that holds `context` tokens between passes."""

    def __init__(self, engine: Engine, context: int, profiler: Profiler) -> None:
        self._engine, self._context = engine, context
        self._clock, self._cancel = profiler._clock, profiler._cancel  # pyright: ignore[reportPrivateUsage]
        text = [ids for prompts in profiler._prompts.values() for prompt in prompts for ids in prompt]  # pyright: ignore[reportPrivateUsage]
        self._ids = [token for token, _ in zip(cycle(text), range(context + max(ROWS)), strict=False)]
        self._cache: Cache = engine.new_cache(min(context + max(ROWS), engine.spec.max_context))
        for at in range(0, context, PREFILL_ROWS):
            part = self._ids[at : min(at + PREFILL_ROWS, context)]
            engine.forward([(TokenBatch.chain(part, scored=0), self._cache)], cancel=self._cancel)
            self._cache.commit(range(len(part)))

    def pass_ms(self, rows: int) -> float:
        """Score `rows` rows, find their best tokens, and forget them again (untimed)."""
        batch = TokenBatch.chain(self._ids[self._context : self._context + rows])
        began = self._clock()
        (scores,) = self._engine.forward([(batch, self._cache)], cancel=self._cancel)
        scores.logits.argmax()
        ended = self._clock()
        self._cache.truncate(self._context)
        return (ended - began) * 1e3


@contextmanager
def _repeating(work: Callable[[], object]) -> Generator[None]:
    """Do `work` over and over on another thread while the block runs; its failure becomes the block's."""
    stop = threading.Event()
    failure: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=loop, name="edgespec-overlap", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failure:
        raise failure[0]


def _cool(state: PowerThermalState | None) -> bool:
    """No sensor counts as cool: there is nothing else to go by."""
    return state is None or state.thermal == "nominal"


def _nested(cells: Mapping[Cell, float]) -> dict[int, dict[int, float]]:
    out: dict[int, dict[int, float]] = defaultdict(dict)
    for (rows, context), ms in sorted(cells.items()):
        out[rows][context] = ms
    return dict(out)


def _median(values: Iterator[float]) -> float | None:
    known = list(values)
    return max(0.0, median(known)) if known else None


def _turns(prompts: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[list[tuple[str, Sequence[int]]]]:
    """The first prompt of every kind, then the second of every kind, …"""
    for i in range(max(map(len, prompts.values()), default=0)):
        yield [(kind, of_kind[i]) for kind, of_kind in prompts.items() if i < len(of_kind)]
