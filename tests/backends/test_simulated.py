from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.simulated import SimulatedEngine, Throttle, VirtualDevice
from edgespec.core.engine import TokenBatch
from edgespec.core.sampling import Sampling
from edgespec.drafting.model import ModelDrafter
from edgespec.orchestrator.loop import decode, prefill
from edgespec.scheduling.adaptive import AdaptivePolicy
from edgespec.scheduling.fixed import FixedPolicy
from edgespec.scheduling.governor import Governor
from edgespec.scheduling.thermal import Stage, ThermalModel
from edgespec.verification.greedy import GreedyVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.engines import make_reference
from tests.helpers.tiny import tiny_checkpoint, tiny_config
from tests.helpers.toyloop import parts_for
from tests.helpers.toys import toy_draft, toy_lm

MODEL = ThermalModel(25.0, (Stage(10.0, 20.0),))  # 2 W hold 45 degrees


def device(*, busy_w: float = 6.0, idle_w: float = 0.0, limit_c: float = 45.0) -> VirtualDevice:
    return VirtualDevice(heat=MODEL.cold(), busy_w={"gpu": busy_w, "npu": 1.0}, idle_w=idle_w, throttle=Throttle(limit_c=limit_c))


def test_a_cool_device_takes_the_nominal_time_and_counts_joules() -> None:
    chip = device(idle_w=0.5)
    assert chip.work("npu", 1500.0) == pytest.approx(1500.0)
    assert chip.clock_s == pytest.approx(1.5) and chip.energy_mj == pytest.approx(1.5 * 1500)
    assert chip.heat.celsius == pytest.approx(MODEL.cold().after(1.5, 1.5).celsius)
    with pytest.raises(KeyError):
        chip.work("tpu", 1.0)


def test_heat_slows_it_to_what_the_case_can_carry() -> None:
    chip = device()
    elapsed = [chip.work("gpu", 100.0) for _ in range(3000)]
    assert elapsed[0] == pytest.approx(100.0)
    sustained = (2.0 / 6.0) ** (1 / 1.3)  # speed at which 6 W · speed^1.3 is the 2 W that hold the limit
    assert 100.0 / np.mean(elapsed[-200:]) == pytest.approx(sustained, rel=0.1)
    assert chip.state().thermal in ("fair", "serious") and chip.peak_c < 45.0 + 8.0


def test_rest_cools_and_gives_speed_back() -> None:
    chip = device()
    for _ in range(500):
        chip.work("gpu", 100.0)
    assert chip.speed < 0.8
    chip.rest(120_000)
    assert chip.speed == 1.0 and chip.state().thermal == "nominal"


@pytest.mark.parametrize(("celsius", "word"), [(30, "nominal"), (41, "fair"), (45, "serious"), (53, "critical")])
def test_words(celsius: float, word: str) -> None:
    assert Throttle(limit_c=45.0).word(celsius) == word


def test_an_engines_work_is_charged_and_its_answers_are_its_own() -> None:
    chip = device()
    engine = toy_lm()
    simulated = SimulatedEngine(engine, chip, "gpu", lambda rows, context: 10.0 * rows + context)
    batch = TokenBatch.chain([1, 2, 3])
    cache, twin = simulated.new_cache(64), engine.new_cache(64)
    (scores,), (expected,) = simulated.forward([(batch, cache)]), engine.forward([(batch, twin)])
    assert scores.logits.argmax().tolist() == expected.logits.argmax().tolist()
    assert chip.clock_s == pytest.approx(0.030)
    cache.commit([0, 1, 2])
    simulated.forward([(TokenBatch.chain([4]), cache)])
    assert chip.clock_s == pytest.approx(0.030 + 0.013)
    assert simulated.spec == engine.spec and simulated.capabilities == engine.capabilities


def test_text_is_the_same_hot_or_cold() -> None:
    """A device driven to its limit, governed, gives the tokens of a cool one that drafts nothing."""
    prompt = [1, 2, 3, 4]

    def run(*, hot: bool) -> tuple[list[int], set[str]]:
        chip = device(busy_w=50.0)
        target = SimulatedEngine(toy_lm(), chip, "gpu", lambda rows, context: 400.0)
        parts = parts_for(target, ModelDrafter(toy_draft()), prompt, k=0)
        if hot:
            parts = replace(parts, policy=Governor(AdaptivePolicy()), power=chip.state)
        prefill(parts, prompt)
        rounds = list(decode(parts, prompt[-1], max_tokens=150, stop_ids=frozenset()))
        return [token for one in rounds for token in one.token_ids], {one.trace.thermal or "" for one in rounds}

    cold, hot = run(hot=False), run(hot=True)
    assert hot[0] == cold[0] and len(hot[0]) == 150
    assert "serious" in hot[1]


def test_a_real_engine_writes_the_same_text_throttled_governed_or_cool(tmp_path: Path) -> None:
    """Whole decoder layers of the reference engine, a draft of other weights, greedy and drawn."""
    config = tiny_config("llama")
    engines = [make_reference(tiny_checkpoint(config, seed=seed), tmp_path) for seed in (0, 1)]
    prompt = [5, 9, 2, 7]

    def run(*, hot: bool, sampling: Sampling) -> tuple[list[int], set[str], int]:
        chip = device(busy_w=50.0 if hot else 0.1)
        target, draft = (SimulatedEngine(engine, chip, "gpu", lambda rows, context: 700.0) for engine in engines)
        verify = RejectionVerifier() if sampling.temperature else GreedyVerifier()
        parts = parts_for(target, ModelDrafter(draft), prompt, k=3, sampling=sampling, verify=verify, seed=4)
        if hot:
            policy = Governor(FixedPolicy(3), model=MODEL, serious_c=45.0)
            parts = replace(parts, policy=policy, power=chip.state)
        prefill(parts, prompt)
        rounds = list(decode(parts, prompt[-1], max_tokens=60, stop_ids=frozenset()))
        tokens = [token for one in rounds for token in one.token_ids]
        return tokens, {one.trace.thermal or "" for one in rounds}, sum(one.trace.drafted for one in rounds)

    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        cold, hot = run(hot=False, sampling=sampling), run(hot=True, sampling=sampling)
        assert hot[0] == cold[0] and len(hot[0]) == 60
        assert hot[1] & {"serious", "critical"} and hot[2] > 0
