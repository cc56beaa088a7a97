from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.device import PowerThermalState
from edgespec.core.errors import DeviceError
from edgespec.drafting import ngram
from edgespec.orchestrator.runtime import Runtime
from edgespec_device_profiles import report
from edgespec_device_profiles.measure import Profiler, Settings
from edgespec_device_profiles.measured import Measured, parse, to_toml
from tests.helpers.timed import MACHINE, Clock, TimedEngine, prompt, timed_runtime

PROMPTS = {"code": [prompt("abc abc abc")], "chat": [prompt("xyz"), prompt("uvw")]}
STAGES = [
    "where the work runs",
    "memory bandwidth",
    "cost of rows",
    "smallest pass",
    "acceptance",
    "two units at once",
    "other engines",
    "speed over time",
]


def profiler(clock: Clock, runtime: Runtime, *, rows: Sequence[int] = (1, 2, 4), seconds: float = 2.0, **options: Any) -> Profiler:
    settings = Settings(seconds=seconds, contexts=(4, 40), rows=rows, max_tokens=48, policy="fixed:3")
    return Profiler(
        runtime,
        PROMPTS,
        **{"machine": MACHINE, "settings": settings, "clock": clock, "now": lambda: datetime(2026, 1, 2, tzinfo=UTC)}
        | {"bandwidth": lambda: 20.0}
        | options,
    )


def cost(rows: int, context: int) -> float:
    return 8.0 + 2.0 * rows + context / 100


def test_costs_are_found_exactly_on_a_steady_machine() -> None:
    clock = Clock()
    measured = profiler(clock, timed_runtime(clock, cost)).run()
    unit = measured.units["cpu"]
    assert measured.complete and measured.not_measured.keys() == {"two units at once", "other engines", "energy"}
    for rows in (1, 2, 4):
        assert unit.forward_ms[rows] == pytest.approx({4: cost(rows, 4), 40: cost(rows, 40)})
        assert unit.forward_p95_ms[rows] == pytest.approx(unit.forward_ms[rows])
    assert unit.dispatch_floor_ms == pytest.approx(cost(1, 1))
    assert unit.bandwidth_gbs == 20.0
    assert measured.model.engine == "toy" and measured.date == "2026-01-02T00:00:00+00:00"
    assert parse(to_toml(measured), origin="f").device().units["cpu"].forward_ms[2] == pytest.approx(unit.forward_ms[2])


def test_other_engines_are_measured_one_after_the_other_and_closed() -> None:
    clock, opened = Clock(), list[Runtime]()

    def other(ms: float) -> Callable[[], Runtime]:
        def load() -> Runtime:
            assert all(runtime.target.closed for runtime in opened), "one at a time"  # type: ignore[attr-defined]
            opened.append(timed_runtime(clock, lambda rows, context: ms * rows))
            return opened[-1]

        return load

    def broken() -> Runtime:
        raise DeviceError("no driver")

    others = {"quick": other(1.0), "slow": other(400.0), "broken": broken}
    measured = profiler(clock, timed_runtime(clock, cost), others=others).run()
    assert measured.engines["quick"].forward_ms == pytest.approx({1: 1.0, 4: 4.0, 8: 8.0})
    assert measured.engines["slow"].forward_ms == pytest.approx({1: 400.0}), "it gets no more passes than there is time for"
    assert measured.not_measured["other engines"] == "broken: no driver"
    assert len(opened) == 2 and all(runtime.target.closed for runtime in opened)  # type: ignore[attr-defined]
    again = parse(to_toml(measured), origin="f").engines
    assert {name: other.forward_ms for name, other in again.items()} == {
        name: pytest.approx(other.forward_ms) for name, other in measured.engines.items()
    }
    text = report.page(measured)
    assert "Other engines" in text and "quick" in text and "400.00" in text


def test_lone_spikes_change_no_figure() -> None:
    clock, passes = Clock(), 0

    def spiky(rows: int, context: int) -> float:
        nonlocal passes
        passes += 1
        return cost(rows, context) * (50.0 if passes % 13 == 0 else 1.0)

    measured = profiler(clock, timed_runtime(clock, spiky), seconds=10.0).run()
    for rows, by_context in measured.unit.forward_ms.items():
        assert by_context == pytest.approx({context: cost(rows, context) for context in by_context})


def test_every_cell_is_sampled_as_often_as_any_other_and_in_turn() -> None:
    clock = Clock()
    runtime = timed_runtime(clock, cost)
    profiler(clock, runtime).run()
    engine = runtime.target
    assert isinstance(engine, TimedEngine)
    cells = [(rows, context) for rows in (1, 2, 4) for context in (4, 40)]
    table = engine.log[: engine.log.index((1, 1))]  # up to the smallest pass
    counts = Counter(table)
    assert set(counts) == set(cells) and len(set(counts.values())) == 1
    assert table[6:12] == cells and table[12:18] == cells[::-1], "sweeps turn around after one that warms up"


def test_the_time_given_is_used_and_not_much_more() -> None:
    used: list[float] = []
    for seconds in (2.0, 20.0):
        clock = Clock()
        profiler(clock, timed_runtime(clock, cost), seconds=seconds).run()
        used.append(clock.now)
    assert used[0] < 8.0 and 8.0 < used[1] < 24.0


def test_acceptance_by_position_comes_from_real_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says its first half again, so n-grams guess it right once they may, and never before."""
    monkeypatch.setattr(ngram, "TRUST", 1e6)
    clock = Clock()
    measured = profiler(clock, timed_runtime(clock, cost)).run()
    for kind in measured.kinds.values():
        assert kind.rounds > 0 and kind.offered[0] > 0
        assert all(k <= t <= o for k, t, o in zip(kind.kept, kind.tested, kind.offered, strict=True))
        assert list(kind.offered) == sorted(kind.offered, reverse=True)
        assert kind.offered[0] == kind.offered[-1], "these n-grams go on for ever: rounds cut short by the end of the answer are left out"
    assert measured.kinds["code"].kept[0] > 0
    assert set(measured.kinds["code"].planned) <= {0, 1, 2, 3}, "what the policy of the run allowed"
    assert {a.mode for a in measured.sustained} == {"plain", "speculative"}
    assert all(a.tok_s > 0 for a in measured.sustained)
    assert measured.draft.ms_per_token is not None and measured.draft.miss_ms is not None


def hot(word: str, since: int) -> Callable[[], PowerThermalState]:
    """A sensor that reads `word` from its `since`-th reading on."""
    reads = 0

    def read() -> PowerThermalState:
        nonlocal reads
        reads += 1
        return PowerThermalState(thermal="nominal" if reads <= since else word)  # type: ignore[arg-type]

    return read


def test_hot_samples_never_become_figures() -> None:
    """ESB-70: three times slower and "serious" after some cool sweeps; the profile is that of the cool machine."""
    clock, sensor = Clock(), hot("serious", since=60)
    state = sensor()

    def power() -> PowerThermalState:
        nonlocal state
        state = sensor()
        return state

    def slow_when_hot(rows: int, context: int) -> float:
        return cost(rows, context) * (1.0 if state.thermal == "nominal" else 3.0)

    measured = profiler(clock, timed_runtime(clock, slow_when_hot), power=power, seconds=10.0).run()
    assert measured.hot_samples > 0
    assert measured.unit.forward_ms[4][40] == pytest.approx(cost(4, 40))
    assert {a.thermal for a in measured.sustained} == {"serious"}


def test_a_device_that_is_always_hot_gives_no_figures_and_says_why() -> None:
    clock = Clock()
    measured = profiler(clock, timed_runtime(clock, cost), power=hot("fair", since=0)).run()
    assert not measured.complete and not measured.usable and measured.unit.forward_ms == {}
    assert "let it cool" in measured.not_measured["cost of rows"]
    assert measured.other_ms is None


@pytest.mark.parametrize("passes", [0, 1, 7, 30, 80, 200])
def test_whatever_was_measured_before_ctrl_c_is_kept(passes: int) -> None:
    clock, cancel = Clock(), CancelToken()
    runtime = timed_runtime(clock, cost)

    def counting(rows: int, context: int) -> float:
        assert isinstance(runtime.target, TimedEngine)
        if len(runtime.target.log) >= passes:
            cancel.cancel()
        return cost(rows, context)

    assert isinstance(runtime.target, TimedEngine)
    runtime.target.cost_ms = counting
    if passes == 0:
        cancel.cancel()
    measured = profiler(clock, runtime, cancel=cancel, seconds=10.0).run()
    assert not measured.complete
    samples = runtime.target.log[6 : runtime.target.log.index((1, 1)) if (1, 1) in runtime.target.log else None]
    # The sample that was running when the token was set is dropped.
    assert sum(map(len, measured.unit.forward_ms.values())) == len(set(samples[:-1] if (1, 1) not in runtime.target.log else samples))
    assert len(runtime.target.log) <= passes + 1
    interrupted = [stage for stage in STAGES if "interrupted" in measured.not_measured.get(stage, "")]
    assert interrupted == STAGES[STAGES.index(interrupted[0]) :], "the stage it stopped in and those after it"
    assert parse(to_toml(measured), origin="f").complete is False


def test_a_stage_that_fails_costs_only_its_own_figures() -> None:
    clock = Clock()

    def broken() -> float:
        raise DeviceError("no memory to measure with")

    measured = profiler(clock, timed_runtime(clock, cost), bandwidth=broken).run()
    assert not measured.complete
    assert measured.not_measured["memory bandwidth"] == "failed: no memory to measure with"
    assert measured.unit.bandwidth_gbs is None and measured.usable and measured.kinds


def test_a_draft_model_has_its_own_costs() -> None:
    clock = Clock()
    draft = TimedEngine(clock, lambda rows, context: 3.0 * rows)
    measured = profiler(clock, timed_runtime(clock, cost, draft=draft)).run()
    assert measured.draft.name == "small" and measured.draft.unit == "cpu"
    assert measured.draft.forward_ms == pytest.approx({4: 3.0, 40: 3.0})
    assert measured.unit.dispatch_floor_ms == pytest.approx(3.0), "of the smaller model"
    assert measured.kinds["code"].kept[0] == measured.kinds["code"].tested[0], "it is its target's twin"
    assert set(measured.kinds["code"].offered) == {measured.kinds["code"].rounds}, "rounds cut short by the end of an answer are left out"
    assert set(measured.not_measured) == {"energy", "other engines"}


def test_two_engines_at_once_slow_each_other_down() -> None:
    clock = Clock()

    def slowed(rows: int, context: int) -> float:
        beside = any(t.name == "edgespec-overlap" for t in threading.enumerate())
        return 10.0 * (1.5 if beside else 1.0)

    runtime = timed_runtime(clock, slowed, draft=TimedEngine(clock, lambda rows, context: 0.0))  # only the target's time passes
    measured = profiler(clock, runtime).run()
    assert measured.overlap_penalty == pytest.approx(1.5)


def test_a_draft_that_fails_beside_the_target_is_reported() -> None:
    clock = Clock()

    class Fragile(TimedEngine):
        def forward(self, work: Any, **options: Any) -> Any:
            if threading.current_thread().name == "edgespec-overlap":
                raise DeviceError("one at a time, please")
            return super().forward(work, **options)

    measured = profiler(clock, timed_runtime(clock, cost, draft=Fragile(clock, lambda rows, context: 1.0))).run()
    assert measured.not_measured["two units at once"] == "failed: one at a time, please"
    assert measured.overlap_penalty is None and measured.sustained


def test_energy_where_there_is_a_meter() -> None:
    clock = Clock()
    measured = profiler(clock, timed_runtime(clock, cost, meter_mj=lambda: clock.now * 5000.0)).run()  # a steady 5 W
    assert "energy" not in measured.not_measured
    plain = measured.energy_mj_per_token["plain"]
    assert plain > measured.energy_mj_per_token["speculative"] > 0
    # 48 tokens or the end of the answer cost about as many passes, and the prompt's passes are free here.
    assert plain == pytest.approx(5.0 * cost(1, 20), rel=0.1)


def test_without_a_drafter_only_costs_are_measured() -> None:
    clock = Clock()
    runtime = Runtime(TimedEngine(clock, cost), timed_runtime(clock).tokenizer, draft="none", engine_name="toy")
    measured: Measured = profiler(clock, runtime).run()
    assert measured.not_measured["acceptance"] == "nothing is drafted"
    assert measured.usable and not measured.kinds


def test_a_small_context_is_measured_within_its_limits() -> None:
    clock = Clock()
    runtime = timed_runtime(clock, cost)
    run = profiler(clock, runtime, settings=Settings(seconds=1.0, contexts=(64, 2048), rows=(1, 2), max_tokens=16, policy="fixed:2"))
    assert set(run.run().unit.forward_ms[1]) == {64}


@pytest.mark.parametrize("context", [8, 40, 79, 80])
def test_a_draft_with_a_small_context_is_measured_within_its_own(context: int) -> None:
    """Sessions draft with it for as long as it has room, so a profile can be made with it."""
    clock = Clock()
    draft = TimedEngine(clock, lambda rows, context: 1.0)
    draft.spec = replace(draft.spec, max_context=context)
    measured = profiler(clock, timed_runtime(clock, cost, draft=draft)).run()
    assert measured.complete and measured.overlap_penalty is not None
    assert all(ms > 0 and at < context for at, ms in measured.draft.forward_ms.items()) and measured.draft.forward_ms


def test_progress_names_every_stage_in_order_and_never_overshoots() -> None:
    clock = Clock()
    told: list[tuple[str, int, int]] = []
    profiler(clock, timed_runtime(clock, cost), progress=lambda *step: told.append(step)).run()
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == STAGES
    assert all(0 <= done <= total for _, done, total in told)
