"""The mathematics of speculation as pure functions; standard library only.

Symbols, where a formula is quoted: α acceptance probability of one draft token, γ draft length, ρ draft step / target step,
o other time per round / target step, v(m) time to score m rows / time to score one row, N draft tokens accepted in a round.
Laws of acceptance: Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318). What is not in closed form here is
summed on purpose: sums stay exact at α = 1 and cost nothing at γ < 100.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

RowCost = Callable[[int], float]  # v(m), with v(1) = 1


# --- how many tokens a round gives -----------------------------------------------------------------------------------


def accepted_law(alphas: Sequence[float]) -> list[float]:
    """P(N = k) for k = 0..γ, where `alphas[i]` is the chance that draft token i is accepted if all before it were."""
    _check_shares(alphas)
    reach = [1.0, *accumulate(alphas, mul)]  # reach[k]: the first k tokens are accepted
    return [reach[k] - reach[k + 1] for k in range(len(alphas))] + [reach[-1]]


def expected_accepted(alphas: Sequence[float]) -> float:
    """E[N] = Σ_k Π_{i<=k} α_i, of γ = len(alphas) draft tokens."""
    _check_shares(alphas)
    return math.fsum(accumulate(alphas, mul))


def variance_accepted(alphas: Sequence[float]) -> float:
    """Var[N], from E[N²] = Σ_k (2k−1) P(N >= k)."""
    second = math.fsum((2 * k - 1) * reach for k, reach in enumerate(accumulate(alphas, mul), start=1))
    return second - expected_accepted(alphas) ** 2


def variation_accepted(alphas: Sequence[float]) -> float:
    """Coefficient of variation √Var[N] / E[N]; infinite where nothing is ever accepted."""
    mean = expected_accepted(alphas)
    return math.sqrt(max(0.0, variance_accepted(alphas))) / mean if mean > 0 else math.inf


def tokens_per_round(alphas: Sequence[float]) -> float:
    """E[N] + 1: the target adds a correction or a bonus token."""
    return expected_accepted(alphas) + 1.0


def constant(alpha: float, gamma: int) -> list[float]:
    """The same acceptance at every one of γ positions."""
    return [alpha] * _length(gamma)


def exponential_decay(alpha: float, beta: float, gamma: int) -> list[float]:
    """α β^{i−1} at position i = 1..γ."""
    return [alpha * beta**i for i in range(_length(gamma))]


def linear_decay(alpha: float, step: float, floor: float, gamma: int) -> list[float]:
    """max(floor, α − step·(i−1)) at position i = 1..γ."""
    return [max(floor, alpha - step * i) for i in range(_length(gamma))]


def step_decay(easy: float, hard: float, easy_length: int, gamma: int) -> list[float]:
    """`easy` at the first `easy_length` of γ positions, `hard` behind them."""
    return [easy if i < easy_length else hard for i in range(_length(gamma))]


def law_overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ min(p, q) = 1 − total variation: acceptance of a draft token sampled from q under the rejection rule."""
    return math.fsum(min(a, b) for a, b in zip(p, q, strict=True))


def law_coincidence(p: Sequence[float], q: Sequence[float]) -> float:
    """Σ p·q: acceptance when a token sampled from q must equal the target's own sample from p."""
    return math.fsum(a * b for a, b in zip(p, q, strict=True))


def divergence_nats(p: Sequence[float], q: Sequence[float]) -> float:
    """Kullback–Leibler D(p‖q); infinite where q forbids what p allows."""
    if any(a > 0 and b <= 0 for a, b in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


# --- speed-up --------------------------------------------------------------------------------------------------------


def flat_cost(rows: int) -> float:
    """v = 1: the textbook's assumption. Wrong on CPUs and for 4-bit products on GPUs; use measured costs."""
    return 1.0


def measured_cost(ms_by_rows: Mapping[int, float]) -> RowCost:
    """v(m) from measured times, linear between measured widths and along the last slope beyond them.

    ValueError unless one row was measured and all times are positive.
    """
    rows = sorted(ms_by_rows)
    if not rows or rows[0] != 1 or any(ms_by_rows[m] <= 0 for m in rows):
        raise ValueError(f"need positive times with one row among them, got {dict(ms_by_rows)}")
    times = [ms_by_rows[m] / ms_by_rows[1] for m in rows]

    def cost(m: int) -> float:
        if len(rows) == 1:
            return times[0]
        right = min(max(bisect_left(rows, m), 1), len(rows) - 1)
        slope = (times[right] - times[right - 1]) / (rows[right] - rows[right - 1])
        if m > rows[-1]:
            return times[-1] + max(0.0, slope) * (m - rows[-1])  # more rows are never cheaper
        return times[right - 1] + slope * (m - rows[right - 1])

    return cost


def speed_up(alphas: Sequence[float], *, rho: float, overhead: float = 0.0, row_cost: RowCost = flat_cost, bonus: bool = True) -> float:
    """S(γ) = tokens per round / (v(γ+1) + γρ + o), against one token per target step; 1 at γ = 0.

    `bonus=False` counts the accepted tokens only, for comparison with texts that forget the target's own token.
    """
    gamma = len(alphas)
    if gamma == 0:
        return 1.0  # plain decoding pays for no draft and no hand-over
    tokens = tokens_per_round(alphas) if bonus else expected_accepted(alphas)
    return tokens / (row_cost(gamma + 1) + gamma * rho + overhead)


def best_draft_length(alphas: Sequence[float], *, rho: float, overhead: float = 0.0, row_cost: RowCost = flat_cost) -> tuple[int, float]:
    """(γ, S(γ)) with the largest S over γ = 0..len(alphas); the shortest of equals. γ = 0 wins when drafting does not pay."""
    candidates = ((speed_up(alphas[:gamma], rho=rho, overhead=overhead, row_cost=row_cost), -gamma) for gamma in range(len(alphas) + 1))
    best, negative = max(candidates)
    return -negative, best


def batch_speed_up(alphas: Sequence[float], sequences: int, *, rho: float, overhead: float = 0.0, row_cost: RowCost = flat_cost) -> float:
    """`sequences` verified in one pass of B(γ+1) rows, against plain decoding of the same batch, B rows a step.

    `rho` and `overhead` are shares of a target step of one row, for the whole batch.
    """
    gamma = len(alphas)
    if gamma == 0:
        return 1.0
    round_time = row_cost(sequences * (gamma + 1)) + gamma * rho + overhead
    return tokens_per_round(alphas) * row_cost(sequences) / round_time


def ahead_round_ms(draft_ms: float, verify_ms: float, *, interference: float = 0.0, handoff_ms: float = 0.0, hit: float = 1.0) -> float:
    """Expected round when the next draft is made on a second unit while the target verifies.

    `interference`: by what share the target slows meanwhile; `hit`: chance that the outcome guessed ahead comes true
    (otherwise the round costs the plain sum).
    """
    _check_shares([hit])
    overlapped = max(draft_ms, verify_ms * (1.0 + interference)) + handoff_ms
    return hit * overlapped + (1.0 - hit) * (draft_ms + verify_ms)


def cascade_bound(stage_speed_ups: Sequence[float]) -> float:
    """Product of the stages' speed-ups: an upper bound only, never a prediction."""
    return math.prod(stage_speed_ups)


# --- memory, bandwidth, power ----------------------------------------------------------------------------------------


def decode_floor_ms(weight_bytes: float, kv_bytes: float, bandwidth_gbs: float) -> float:
    """Least time per token: every byte is read once through the bandwidth of the unit that runs it."""
    return (weight_bytes + kv_bytes) / (bandwidth_gbs * 1e9) * 1e3


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_value: float) -> float:
    """Keys and values of one token."""
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def attainable_gflops(peak_gflops: float, bandwidth_gbs: float, flops_per_byte: float) -> float:
    """Roofline (Williams et al. 2009)."""
    return min(peak_gflops, bandwidth_gbs * flops_per_byte)


def ridge_flops_per_byte(peak_gflops: float, bandwidth_gbs: float) -> float:
    """Intensity at which a unit turns from bandwidth-bound to compute-bound."""
    return peak_gflops / bandwidth_gbs


def compute_bound_rows(ridge: float, bytes_per_weight: float) -> float:
    """Rows from which on scoring is compute-bound: each row costs 2 FLOPs a weight, the weight is read once."""
    return ridge * bytes_per_weight / 2.0


def sequences_that_fit(memory_bytes: float, weight_bytes: float, reserve_bytes: float, bytes_per_sequence: float) -> int:
    """How many caches fit beside the weights and a reserve; 0 when not even those fit."""
    if bytes_per_sequence <= 0:
        raise ValueError(f"bytes_per_sequence must be > 0, got {bytes_per_sequence}")
    return max(0, math.floor((memory_bytes - weight_bytes - reserve_bytes) / bytes_per_sequence))


def energy_per_token_mj(power_w: float, ms_per_token: float) -> float:
    """Watts × milliseconds = millijoules."""
    return power_w * ms_per_token


def pipeline_efficiency(items: int, stages: int) -> float:
    """n / (n + k − 1): share of the slowest stage's time that is used when n items pass k stages."""
    return items / (items + stages - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFit:
    """Whether a draft suits its target, by three rules of thumb; a report, never a refusal. None: unknown."""

    speed: bool
    memory: bool | None
    power: bool | None
    speed_limit_ms: float  # a draft step must stay below this


def draft_fit(
    *,
    draft_ms: float,
    target_ms: float,
    alpha: float,
    gamma: int,
    memory_share: float | None = None,
    power_share: float | None = None,
) -> DraftFit:
    """τ_q < τ_p / (γ(1−α)), draft memory < .1 and draft power < .2 of the target's."""
    waste = gamma * (1.0 - alpha)
    limit = target_ms / waste if waste > 0 else math.inf
    return DraftFit(
        speed=draft_ms < limit,
        memory=None if memory_share is None else memory_share < 0.1,
        power=None if power_share is None else power_share < 0.2,
        speed_limit_ms=limit,
    )


def _check_shares(values: Sequence[float]) -> None:
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"a probability lies in 0..1, got {value}")


def _length(gamma: int) -> int:
    if gamma < 0:
        raise ValueError(f"a draft length is >= 0, got {gamma}")
    return gamma
