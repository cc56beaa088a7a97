"""Checked values of the mathematics, and comparison with brute-force enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec import analysis as an

shares = st.floats(0, 1)


def enumerate_accepted(alphas: list[float]) -> list[float]:
    """P(N = k) by running through every pattern of accepting and refusing."""
    law = [0.0] * (len(alphas) + 1)
    for pattern in itertools.product([True, False], repeat=len(alphas)):
        chance = math.prod(a if taken else 1 - a for a, taken in zip(alphas, pattern, strict=True))
        law[next((i for i, taken in enumerate(pattern) if not taken), len(alphas))] += chance
    return law


@given(st.lists(shares, max_size=7))
def test_moments_equal_enumeration(alphas: list[float]) -> None:
    law = enumerate_accepted(alphas)
    mean = sum(k * p for k, p in enumerate(law))
    assert an.accepted_law(alphas) == pytest.approx(law, abs=1e-12)
    assert an.expected_accepted(alphas) == pytest.approx(mean, abs=1e-12)
    assert an.tokens_per_round(alphas) == pytest.approx(mean + 1, abs=1e-12)
    assert an.variance_accepted(alphas) == pytest.approx(sum(k * k * p for k, p in enumerate(law)) - mean**2, abs=1e-9)


@given(st.floats(0, 0.999), st.integers(0, 40))
def test_closed_forms(alpha: float, gamma: int) -> None:
    assert an.expected_accepted(an.constant(alpha, gamma)) == pytest.approx(alpha * (1 - alpha**gamma) / (1 - alpha), rel=1e-9)
    assert an.tokens_per_round(an.constant(alpha, gamma)) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-9)


def test_checked_moments() -> None:
    assert an.expected_accepted(an.constant(0.8, 4)) == pytest.approx(2.3616, abs=5e-5)
    assert an.variance_accepted(an.constant(0.8, 4)) == pytest.approx(2.5700, abs=5e-5)
    assert an.expected_accepted(an.constant(0.6, 3)) == pytest.approx(1.1760, abs=5e-5)
    assert an.variance_accepted(an.constant(0.6, 3)) == pytest.approx(1.3770, abs=5e-5)
    assert an.expected_accepted(an.exponential_decay(0.8, 0.9, 5)) == pytest.approx(2.0812, abs=5e-5)
    assert an.variation_accepted(an.constant(0.8, 4)) == pytest.approx(math.sqrt(2.5700) / 2.3616, abs=1e-4)
    assert an.variation_accepted([0.0, 0.5]) == math.inf
    assert an.expected_accepted(an.constant(1.0, 6)) == 6


def test_the_forms_in_circulation_are_wrong_and_not_ours() -> None:
    a, g = 0.8, 4
    wrong_mean = a * (1 - (g + 1) * a**g + g * a ** (g + 1)) / (1 - a) ** 2
    wrong_square = a * (1 + a - (g + 1) ** 2 * a**g + (g * g + g) * a ** (g + 1)) / (1 - a) ** 3
    assert an.expected_accepted(an.constant(a, g)) != pytest.approx(wrong_mean, rel=0.1)
    assert wrong_square < 0 < an.variance_accepted(an.constant(a, g))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 12))
def test_exponential_decay_has_its_closed_sum(alpha: float, beta: float, gamma: int) -> None:
    expected = sum(alpha**k * beta ** (k * (k - 1) // 2) for k in range(1, gamma + 1))
    assert an.expected_accepted(an.exponential_decay(alpha, beta, gamma)) == pytest.approx(expected, abs=1e-9)


def test_other_decays() -> None:
    assert an.linear_decay(0.9, 0.2, 0.4, 4) == pytest.approx([0.9, 0.7, 0.5, 0.4])
    assert an.step_decay(0.9, 0.3, 2, 4) == [0.9, 0.9, 0.3, 0.3]


@pytest.mark.parametrize(
    ("alpha", "rho", "gamma", "gain", "best", "best_gain"),
    [(0.7, 0.1, 4, 1.981, 4, 1.981), (0.8, 0.1, 6, 2.470, 6, 2.470), (0.9, 0.05, 10, 4.575, 13, 4.674), (0.95, 0.02, 20, 9.421, 31, 9.954)],
)
def test_checked_speed_ups(alpha: float, rho: float, gamma: int, gain: float, best: int, best_gain: float) -> None:
    assert an.speed_up(an.constant(alpha, gamma), rho=rho) == pytest.approx(gain, abs=5e-4)
    found, found_gain = an.best_draft_length(an.constant(alpha, 64), rho=rho)
    assert (found, round(found_gain, 3)) == (best, best_gain)


@pytest.mark.parametrize(("alpha", "rho", "overhead"), [(0.7, 0.1, 0.0), (0.8, 0.1, 0.3), (0.9, 0.05, 0.1), (0.95, 0.02, 0.0)])
def test_the_integer_optimum_neighbours_the_stationary_point(alpha: float, rho: float, overhead: float) -> None:
    def slope(gamma: float) -> float:  # negative before the optimum, positive behind it
        return rho - alpha ** (gamma + 1) * (rho - (1 + gamma * rho + overhead) * math.log(alpha))

    best, _ = an.best_draft_length(an.constant(alpha, 100), rho=rho, overhead=overhead)
    assert slope(best - 1) < 0 < slope(best + 1)


def test_the_bonus_token_counts() -> None:
    alphas = an.constant(0.8, 4)
    assert an.speed_up(alphas, rho=0.1, bonus=False) == pytest.approx(1.687, abs=5e-4)
    assert an.speed_up(alphas, rho=0.1) == pytest.approx(2.401, abs=5e-4)


def test_plain_decoding_wins_when_rows_are_dear() -> None:
    dear = an.measured_cost({1: 10.0, 5: 22.0})
    assert an.best_draft_length(an.constant(0.2, 8), rho=0.4, row_cost=dear) == (0, 1.0)
    gamma, gain = an.best_draft_length(an.constant(0.9, 8), rho=0.05, row_cost=dear)
    assert gamma > 0 and gain > 1


@given(shares, st.floats(0, 1), st.floats(0, 2), st.floats(1, 6))
def test_best_is_the_best_and_never_below_plain(alpha: float, rho: float, overhead: float, cost8: float) -> None:
    cost = an.measured_cost({1: 1.0, 8: cost8})
    gains = [an.speed_up(an.constant(alpha, g), rho=rho, overhead=overhead, row_cost=cost) for g in range(13)]
    best, gain = an.best_draft_length(an.constant(alpha, 12), rho=rho, overhead=overhead, row_cost=cost)
    assert gain == max(gains) >= 1.0
    assert best == gains.index(gain)


def test_measured_cost_interpolates_and_extrapolates() -> None:
    cost = an.measured_cost({1: 10.0, 3: 20.0, 5: 24.0})
    assert [cost(m) for m in (1, 2, 3, 4, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 2.2, 2.4, 2.8])
    assert an.measured_cost({1: 5.0})(9) == 1.0
    falling = an.measured_cost({1: 10.0, 4: 20.0, 8: 18.0})
    assert falling(16) == pytest.approx(1.8)
    for bad in ({}, {2: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="one row"):
            an.measured_cost(bad)


def test_batches_compare_with_plain_batches() -> None:
    alphas = an.constant(0.8, 3)
    cost = an.measured_cost({1: 10.0, 16: 25.0})
    assert an.batch_speed_up(alphas, 1, rho=0.1, row_cost=cost) == an.speed_up(alphas, rho=0.1, row_cost=cost)
    assert an.batch_speed_up(alphas, 4, rho=0.1, row_cost=cost) == pytest.approx(2.952 * 1.3 / (2.5 + 0.3))


def test_ahead_hides_the_shorter_part() -> None:
    assert an.ahead_round_ms(20, 50, interference=0.1, handoff_ms=1) == pytest.approx(56)
    assert an.ahead_round_ms(70, 50, handoff_ms=1) == 71
    assert an.ahead_round_ms(20, 50, hit=0.0) == 70
    assert an.ahead_round_ms(20, 50, hit=0.5) == 60


def test_checked_laws() -> None:
    p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    assert an.divergence_nats(p, q) == pytest.approx(0.04747, abs=5e-6)
    assert an.divergence_nats(q, p) == pytest.approx(0.04008, abs=5e-6)
    assert an.law_overlap(p, q) == pytest.approx(0.9)
    assert an.divergence_nats([0.5, 0.5], [1.0, 0.0]) == math.inf

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp(x) for x in logits]
        return [w / sum(weights) for w in weights]

    target, draft = softmax([2, 1, 0.5, 0]), softmax([0.5, 2, 1, 0.8])
    assert an.law_overlap(target, draft) == pytest.approx(0.5387, abs=5e-5)
    assert an.law_coincidence(target, draft) == pytest.approx(0.2185, abs=5e-5)


def test_memory_and_bandwidth() -> None:
    assert an.kv_bytes_per_token(28, 2, 128, 4) == 57344
    assert an.decode_floor_ms(3.5e9, 0.5e9, 100) == pytest.approx(40.0)
    assert an.sequences_that_fit(8e9, 1.5e9, 0.5e9, 50e6) == 120
    assert an.sequences_that_fit(1e9, 2e9, 0, 1) == 0
    assert an.attainable_gflops(1000, 100, 4) == 400
    assert an.attainable_gflops(1000, 100, 40) == 1000
    ridge = an.ridge_flops_per_byte(1000, 100)
    assert an.compute_bound_rows(ridge, 0.5) == 2.5
    # at that many rows, 2 FLOPs a weight and row over its bytes is exactly the ridge
    assert 2 * an.compute_bound_rows(ridge, 0.5) / 0.5 == ridge
    with pytest.raises(ValueError, match="bytes_per_sequence"):
        an.sequences_that_fit(1, 0, 0, 0)


def test_energy_pipeline_and_cascade() -> None:
    assert an.energy_per_token_mj(10, 40) == 400
    assert an.pipeline_efficiency(8, 3) == 0.8
    assert an.cascade_bound([1.5, 2.0]) == 3.0


def test_draft_fit_reports_each_criterion() -> None:
    fit = an.draft_fit(draft_ms=10, target_ms=100, alpha=0.8, gamma=4, memory_share=0.3, power_share=0.1)
    assert fit.speed and fit.memory is False and fit.power
    assert fit.speed_limit_ms == pytest.approx(125.0)
    assert an.draft_fit(draft_ms=200, target_ms=100, alpha=0.8, gamma=4).speed is False
    assert an.draft_fit(draft_ms=200, target_ms=100, alpha=1.0, gamma=4).speed_limit_ms == math.inf


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        an.expected_accepted([1.2])
    with pytest.raises(ValueError, match="draft length"):
        an.constant(0.5, -1)
