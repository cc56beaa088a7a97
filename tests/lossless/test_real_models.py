"""Greedy speculation on real quantised models: bit for bit where the graph is width-invariant, the two-part check elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from edgespec.core.drafter import Drafter
from edgespec.core.sampling import Sampling, SamplingState
from edgespec.core.verifier import Verifier
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.drafting.pool import Pool
from edgespec.orchestrator.loop import Parts, decode, prefill
from edgespec.orchestrator.runtime import Runtime
from edgespec.verification.greedy import GreedyVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.divergence import check_divergence, tree_rounding
from tests.helpers.hostile import SpoilingDrafter
from tests.helpers.real import PROMPTS, loaded
from tests.helpers.toyloop import Always

MLX_ROUNDING = 0.05  # logits; float32 activations
INT8_TREE_ROUNDING = 1.5  # logits; 30 layers of 8-bit activations, the largest of 49152 columns (1.3 seen)
SMALL, TARGET, DRAFT = "smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"


@dataclass(frozen=True)
class Spoken:
    """An answer, with the exact bits of the target's log-probability of each token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept: int
    drafted: int
    refused: int  # rounds that ended in a correction


def speak(
    runtime: Runtime,
    drafter: Drafter,
    prompt: list[int],
    *,
    n: int,
    k: int,
    seed: int = 0,
    sampling: Sampling | None = None,
    verify: Verifier | None = None,
) -> Spoken:
    sampling = sampling or Sampling(logprobs=0)
    pool = Pool(drafter)
    pool.start(prompt, sampling=sampling)
    parts = Parts(
        target=runtime.target,
        cache=runtime.target.new_cache(len(prompt) + n),
        drafters=pool,
        verify=verify or GreedyVerifier(),
        policy=Always(k),
        state=SamplingState.after(sampling, prompt),
        target_rng=np.random.default_rng([seed, 0]),
        draft_rng=np.random.default_rng([seed, 1]),
    )
    prefill(parts, prompt)
    rounds = list(decode(parts, prompt[-1], max_tokens=n, stop_ids=frozenset(runtime.tokenizer.stop_ids)))
    return Spoken(
        tuple(t for r in rounds for t in r.token_ids),
        tuple(p.logprob for r in rounds for p in r.logprobs),
        sum(r.trace.kept for r in rounds),
        sum(r.trace.drafted for r in rounds),
        sum(r.origins[-1] == "corrected" for r in rounds),
    )


def encoded(runtime: Runtime, count: int) -> list[list[int]]:
    return [runtime.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[:count]]


def compare(
    runtime: Runtime, drafters: dict[str, Callable[[dict[tuple[int, ...], tuple[int, ...]]], Drafter]], *, count: int, n: int, k: int
) -> None:
    """Every drafter's answers equal plain decoding's in every id and in every bit of every log-probability."""
    prompts = encoded(runtime, count)
    plain = [speak(runtime, NoDrafter(), prompt, n=n, k=0) for prompt in prompts]
    answers = {tuple(prompt): spoken.token_ids for prompt, spoken in zip(prompts, plain, strict=True)}
    for name, make in drafters.items():
        drafter = make(answers)
        kept = drafted = 0
        for i, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
            spoken = speak(runtime, drafter, prompt, n=n, k=k, seed=i)
            assert spoken.token_ids == expected.token_ids, (name, PROMPTS[i])
            assert spoken.logprobs == expected.logprobs, (name, PROMPTS[i])
            kept, drafted = kept + spoken.kept, drafted + spoken.drafted
        assert 0 < kept <= drafted, f"{name} never guessed right, so nothing was tested"


@pytest.mark.real
def test_smollm2_speculation_is_plain_decoding_bit_for_bit() -> None:
    runtime = loaded(SMALL)
    assert runtime.target.capabilities.width_invariant
    compare(
        runtime,
        {
            "ngram": lambda answers: NgramDrafter(min_n=1),
            "itself": lambda answers: ModelDrafter(runtime.target, capacity=512),
            "spoiling": lambda answers: SpoilingDrafter(answers, runtime.spec.vocab_size),
        },
        count=50,
        n=20,
        k=6,
    )


@pytest.mark.heavy
def test_the_qwen_pair_speculates_bit_for_bit() -> None:
    runtime = loaded(TARGET, draft=DRAFT)
    assert runtime.target.capabilities.width_invariant
    assert runtime.draft_engine is not None
    draft = runtime.draft_engine
    compare(
        runtime,
        {
            "ngram": lambda answers: NgramDrafter(min_n=1),
            "model": lambda answers: ModelDrafter(draft, capacity=1024),
            "spoiling": lambda answers: SpoilingDrafter(answers, runtime.spec.vocab_size),
        },
        count=50,
        n=24,
        k=5,
    )


@pytest.mark.real
def test_smollm2_never_refuses_itself() -> None:
    runtime = loaded(SMALL)
    for prompt in encoded(runtime, 3):
        spoken = speak(runtime, ModelDrafter(runtime.target, capacity=512), prompt, n=25, k=4)
        assert spoken.refused == 0 < spoken.kept
        sampled = speak(
            runtime,
            ModelDrafter(runtime.target, capacity=512),
            prompt,
            n=25,
            k=4,
            sampling=Sampling(temperature=0.8, top_p=0.95),
            verify=RejectionVerifier(),
        )
        assert sampled.refused == 0 < sampled.kept


@pytest.mark.real
@pytest.mark.parametrize(("engine", "tree", "count", "n"), [("onnx", True, 12, 20), ("mlx", False, 1, 8), ("mlx", True, 1, 8)])
def test_esb_09_trees_and_other_engines_differ_by_rounding_only(engine: str, tree: bool, count: int, n: int) -> None:
    """With 8-bit activations a side branch rounds otherwise than a chain does. How much is measured, not assumed."""
    runtime = loaded(SMALL, engine=engine)
    prompts = encoded(runtime, count)
    tolerance = MLX_ROUNDING
    if engine == "onnx":
        rng = np.random.default_rng(3)
        rounding = max(tree_rounding(runtime.target, prompt, rng) for prompt in prompts)
        assert rounding <= INT8_TREE_ROUNDING
        tolerance = 2 * rounding  # both choices are moved
    plain = {tuple(p): speak(runtime, NoDrafter(), p, n=n, k=0).token_ids for p in prompts}
    drafter = SpoilingDrafter(plain, runtime.spec.vocab_size, tree=tree)
    kept = 0
    for i, prompt in enumerate(prompts):
        spoken = speak(runtime, drafter, prompt, n=n, k=8, seed=i)
        kept += spoken.kept
        check_divergence(runtime.target, prompt, plain[tuple(prompt)], spoken.token_ids, tolerance=tolerance)
    assert kept > 0
