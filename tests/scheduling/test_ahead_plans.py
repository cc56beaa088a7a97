"""When the adaptive policy lets a drafter work ahead: made-up machines with two units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgespec.core.device import DeviceProfile, PowerThermalState
from edgespec.core.drafter import Offer
from edgespec.core.plan import Knobs, Plan
from edgespec.core.trace import RoundTrace
from edgespec.scheduling.adaptive import UNDISTURBED_EVERY, AdaptivePolicy
from edgespec.scheduling.costs import FORGOTTEN, STALE, Disturbance, RowCosts, ahead_ms
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.memory import Memory, learn
from tests.helpers.rounds import made_round, made_state
from tests.helpers.worlds import World, expected_throughput, play

GENERIC = DeviceProfile.generic()


def world(overlap: float | None, alpha: float = 0.9, draft_ms: float = 4.0) -> World:
    return World(lambda rows: 20.0 + rows, draft_ms, [alpha] * 32, noise=0.05, spikes=0.01, overlap=overlap)


def profile(overlap: float | None) -> DeviceProfile:
    return DeviceProfile(chip="two units", overlap_penalty=overlap)


def share_ahead(history: list[RoundTrace]) -> float:
    return float(np.mean([trace.ahead for trace in history]))


@pytest.mark.parametrize("seed", range(4))
def test_two_units_that_hardly_disturb_each_other_work_at_once(seed: int) -> None:
    here = world(1.03)
    history = play(here, AdaptivePolicy(), 800, np.random.default_rng(seed), profile=profile(1.03))
    assert share_ahead(history[200:]) > 0.85
    assert expected_throughput(here, history) > 1.08 * world(None).oracle(), "better than the best there is without"
    assert expected_throughput(here, history) > 0.93 * here.oracle()


@pytest.mark.parametrize("seed", range(4))
def test_units_that_slow_each_other_down_take_turns(seed: int) -> None:
    history = play(world(1.9), AdaptivePolicy(), 400, np.random.default_rng(seed), profile=profile(1.9))
    assert share_ahead(history) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_a_profile_that_promises_too_much_is_found_out(seed: int) -> None:
    here = world(1.9)
    history = play(here, AdaptivePolicy(), 800, np.random.default_rng(seed), profile=profile(1.03))
    assert 0.0 < share_ahead(history) < 0.05, "tried, and tried again after a long while"
    assert expected_throughput(here, history) > 0.93 * here.oracle()


def test_without_a_profile_it_never_does() -> None:
    assert share_ahead(play(world(1.03), AdaptivePolicy(), 400, np.random.default_rng(0), profile=GENERIC)) == 0.0


def test_a_drafter_that_cannot_is_never_asked_to() -> None:
    assert share_ahead(play(world(None), AdaptivePolicy(), 400, np.random.default_rng(0), profile=profile(1.0))) == 0.0


def test_outcomes_that_are_hard_to_foresee_are_not_worth_it() -> None:
    assert share_ahead(play(world(1.03, alpha=0.4), AdaptivePolicy(), 400, np.random.default_rng(0), profile=profile(1.03))[50:]) < 0.02


def test_it_stops_when_acceptance_falls_and_resumes_when_it_rises() -> None:
    policy, rng, history = AdaptivePolicy(), np.random.default_rng(1), list[RoundTrace]()
    shares: list[float] = []
    for alpha in (0.9, 0.3, 0.9):
        play(world(1.03, alpha=alpha), policy, 400, rng, history=history, profile=profile(1.03))
        shares.append(share_ahead(history[-150:]))
    assert shares[0] > 0.85 < shares[2] and shares[1] < 0.05


def test_the_target_is_timed_undisturbed_now_and_then() -> None:
    history = play(world(1.03), AdaptivePolicy(), 600, np.random.default_rng(0), profile=profile(1.03))
    assert UNDISTURBED_EVERY < STALE
    alone = [i for i, trace in enumerate(history) if not trace.ahead]
    gaps = np.diff([i for i in alone if i > 200])
    assert len(gaps) > 10 and max(gaps) <= UNDISTURBED_EVERY + 2


def ahead_round(index: int, *, factor: float = 1.5, energy_mj: float | None = None) -> RoundTrace:
    trace = made_round(index, planned=4, kept=4, draft_ms=1.0, verify_ms=20.0 * factor, offers=(Offer("model", ahead=True),))
    return replace(trace, ahead=1, predrafted=4, offer_ms=1.0, energy_mj=energy_mj)


def test_disturbed_passes_and_free_drafts_teach_nothing_but_the_disturbance() -> None:
    memory = Memory()
    for i in range(5):
        learn(memory, replace(made_round(i, planned=4, kept=4, draft_ms=8.0, verify_ms=20.0), energy_mj=100.0))
    for i in range(5, 15):
        learn(memory, ahead_round(i, energy_mj=130.0))
    costs = memory.draft_costs("model", hot=False)
    assert memory.cool.ms(5) == pytest.approx(20.0) and memory.cool.age(5) == 10
    assert costs.ms(4) == pytest.approx(8.0)
    assert memory.beside.factor(1.0) == pytest.approx(1.45) and memory.beside_energy.factor(1.0) == pytest.approx(1.27)
    learn(memory, replace(made_round(15, planned=4, draft_ms=9.5, verify_ms=20.0), offer_ms=1.5))
    assert costs.ms(4) == pytest.approx(8.0), "stopping what was made ahead is no part of making a draft"


def test_a_disturbance_is_a_median_with_an_assumption_that_returns() -> None:
    beside = Disturbance()
    assert beside.factor(1.03) == 1.03
    for seen in (1.2, 1.2, 9.0, 1.2, float("nan"), 0.0, 1.2):
        beside.observe(seen)
    assert beside.factor(1.2) == pytest.approx(1.2)
    for _ in range(FORGOTTEN):
        beside.rest()
    assert beside.factor(1.03) == 1.03


def test_a_skipped_pass_only_ages_what_is_known() -> None:
    book = RowCosts()
    book.observe(3, 10.0)
    book.skip()
    assert (book.ms(3), book.samples(3), book.age(3)) == (10.0, 1, 1)


@pytest.mark.parametrize(
    ("foreseen", "factor", "ms"),
    [
        (1.0, 1.0, 20.0),  # hidden behind the target
        (1.0, 1.1, 22.0),
        (0.0, 1.0, 20.0 + 8.0 + 1.0),  # drafted after all, and a worker to be stopped
        (0.5, 1.0, 24.5),
    ],
)
def test_what_a_round_ahead_costs(foreseen: float, factor: float, ms: float) -> None:
    assert ahead_ms(20.0, 8.0, 2.0, factor=factor, foreseen=foreseen) == pytest.approx(ms)


def test_a_draft_longer_than_the_targets_pass_is_waited_for() -> None:
    assert ahead_ms(20.0, 30.0, 5.0, factor=1.0, foreseen=1.0) == pytest.approx(35.0)


def test_joules_count_against_it() -> None:
    """Working ahead saves time here, but what was guessed wrongly was paid for."""

    def share(energy: str) -> float:
        policy, rng, history = AdaptivePolicy(), np.random.default_rng(3), list[RoundTrace]()
        knobs = Knobs(energy="fast") if energy == "fast" else Knobs(energy="saver")
        for _ in range(400):
            play(world(1.03), policy, 1, rng, history=history, profile=profile(1.03), knobs=knobs)
            last = history[-1]
            watts = 12.0 if last.ahead else 5.0
            history[-1] = replace(last, energy_mj=watts * last.round_ms)
        return share_ahead(history[200:])

    assert share("fast") > 0.8
    assert share("saver") < 0.2


class AlwaysAhead:
    """Plans ahead and remembers what it was told."""

    name, wants_entropy = "ahead", False

    def __init__(self) -> None:
        self.offers: list[tuple[Offer, ...]] = []

    def __call__(self, history, state, profile, knobs) -> Plan:  # type: ignore[no-untyped-def]
        self.offers.append(state.offers)
        return Plan(3, ahead=1)


def test_nothing_is_drafted_ahead_when_power_is_to_be_saved() -> None:
    inner = AlwaysAhead()
    governor = Governor(inner)
    state = made_state(offers=(Offer("model", ahead=True), Offer("ngram")))
    assert governor([], state, profile(1.0), Knobs()).ahead == 1
    saving = replace(state, power=PowerThermalState(low_power_mode=True))
    assert governor([], saving, profile(1.0), Knobs()).ahead == 0
    assert [[offer.ahead for offer in offers] for offers in inner.offers] == [[True, False], [False, False]], "nor priced so"


@pytest.mark.parametrize(("alpha", "draft_ms"), [(0.7, 5.0), (0.85, 2.0), (0.85, 5.0), (0.95, 2.0), (0.95, 5.0)])
def test_what_it_brings_on_two_units(alpha: float, draft_ms: float) -> None:
    """Printed: throughput against the best fixed plan known in hindsight, and against this policy where nothing can be drafted ahead."""
    here, one_unit = world(1.03, alpha, draft_ms), world(None, alpha, draft_ms)
    shares, gains = list[float](), list[float]()
    for seed in range(4):
        history = play(here, AdaptivePolicy(), 1000, np.random.default_rng(seed), profile=profile(1.03))
        without = play(one_unit, AdaptivePolicy(), 1000, np.random.default_rng(seed))
        got = expected_throughput(here, history)
        shares.append(got / here.oracle())
        gains.append(got / expected_throughput(one_unit, without) - 1)
    print(f"alpha {alpha}, draft step {draft_ms} ms: share of the oracle {np.mean(shares):.3f}, gain {np.mean(gains):.1%}")
    assert min(shares) > 0.9
    assert np.mean(gains) > 0.015
