"""Promise 2: with sampling, the joint law of the output is the target's, for chains and trees, filters and penalties."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.core.drafter import Drafter
from edgespec.core.sampling import Sampling, SamplingState
from edgespec.core.verifier import Verifier
from edgespec.drafting.ahead import AheadDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.ngram import NgramDrafter
from edgespec.drafting.none import NoDrafter
from edgespec.verification.match import MatchVerifier
from edgespec.verification.rejection import RejectionVerifier
from tests.helpers.toyloop import run_ids, run_rounds
from tests.helpers.toys import FIXED_DRAFT, FIXED_TARGET, AdversaryDrafter, ToyEngine, TreeDrafter, fixed_dist, hashed_logits

V, TRIALS, TOKENS = 4, 4000, 3
PROMPT = [2, 1, 2, 1, 2]


def target() -> ToyEngine:
    return ToyEngine(lambda tokens: hashed_logits(tokens, 11, V), vocab_size=V)


def unrelated() -> ToyEngine:
    return ToyEngine(lambda tokens: hashed_logits(tokens, 900, V), vocab_size=V)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(min_n=1),
    "adversary": lambda: AdversaryDrafter(V),
    "model": lambda: ModelDrafter(unrelated()),
    "itself": lambda: ModelDrafter(target()),
    "ahead": lambda: AheadDrafter(ModelDrafter(unrelated())),
    "tree": lambda: TreeDrafter(unrelated(), width=2),
}
OPTIONS = {
    "plain": Sampling(temperature=0.8),
    "filters": Sampling(temperature=1.1, top_k=3, top_p=0.92, min_p=0.05),
    "penalties": Sampling(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, bias={0: 0.5}),
}


def exact_law(sampling: Sampling) -> np.ndarray:
    """The joint law of the first TOKENS tokens by enumeration: [V, V, V]."""
    engine, out = target(), np.zeros((V,) * TOKENS)
    for tokens in itertools.product(range(V), repeat=TOKENS):
        p = 1.0
        for i, token in enumerate(tokens):
            known = PROMPT + list(tokens[:i])
            p *= float(np.exp(SamplingState.after(sampling, known).law(engine.law(known))[token]))
        out[tokens] = p
    return out


def chi_squared_excess(counts: np.ndarray, law: np.ndarray) -> float:
    """Standard deviations by which χ² exceeds its degrees of freedom; rare cells are pooled."""
    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0, "a token of probability 0 was emitted"
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    keep = wanted > 0
    chi2 = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    dof = keep.sum() - 1
    return float((chi2 - dof) / np.sqrt(2 * dof))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("verify", [RejectionVerifier(), MatchVerifier()], ids=["rejection", "match"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_joint_law_of_several_tokens_is_the_targets(drafter: Callable[[], Drafter], verify: Verifier, options: Sampling) -> None:
    engine, counts = target(), np.zeros((V,) * TOKENS)
    guesser = drafter()
    for trial in range(TRIALS):
        counts[tuple(run_ids(engine, guesser, PROMPT, n=TOKENS, k=3, sampling=options, verify=verify, seed=trial, capacity=64))] += 1
    assert chi_squared_excess(counts, exact_law(options)) < 4.5


def first_tokens(
    sampling: Sampling, verify: Verifier, draft_logits: np.ndarray = FIXED_DRAFT, trials: int = 20_000
) -> tuple[np.ndarray, float]:
    """Frequencies of the first token [4], and the share of guesses kept, on FixedDist."""
    engine, drafter = fixed_dist(FIXED_TARGET), ModelDrafter(fixed_dist(FIXED_DRAFT))
    counts, kept = np.zeros(4), 0
    for trial in range(trials):
        (first, *_) = run_rounds(engine, drafter, [0], n=2, k=1, sampling=sampling, verify=verify, seed=trial, capacity=16)
        counts[first.token_ids[0]] += 1
        kept += first.trace.kept
    return counts / trials, kept / trials


@pytest.mark.parametrize(
    ("sampling", "law"),
    [
        (Sampling(temperature=1.0), [0.5793, 0.2131, 0.1293, 0.0784]),
        (Sampling(temperature=0.5), [0.831, 0.113, 0.041, 0.015]),
        (Sampling(temperature=1.0, top_k=2), [0.731, 0.269, 0.0, 0.0]),
        (Sampling(temperature=1.0, top_p=0.7), [0.731, 0.269, 0.0, 0.0]),
        (Sampling(temperature=1.0, min_p=0.3), [0.731, 0.269, 0.0, 0.0]),
    ],
    ids=["esb_21_t1", "esb_21_t05", "esb_01_top_k", "esb_01_top_p", "esb_01_min_p"],
)
def test_esb_01_21_the_ratio_uses_the_law_the_guess_was_drawn_from(sampling: Sampling, law: list[float]) -> None:
    frequencies, _ = first_tokens(sampling, RejectionVerifier())
    assert np.abs(frequencies - law).max() < 0.015


def test_rejection_keeps_the_overlap_and_matching_the_product() -> None:
    _, rejection = first_tokens(Sampling(temperature=1.0), RejectionVerifier())
    frequencies, match = first_tokens(Sampling(temperature=1.0), MatchVerifier())
    assert abs(rejection - 0.5387) < 0.015
    assert abs(match - 0.2185) < 0.015
    assert np.abs(frequencies - [0.5793, 0.2131, 0.1293, 0.0784]).max() < 0.015  # ESB-22: exact, since the draw is always emitted


class KeepIfArgmax:
    """The biased rule: keep the guess if it is the argmax, else draw. The checks above must tell it from the exact ones."""

    name, lossless = "keep-if-argmax", False

    def __call__(self, draft, logits, state, rng):  # type: ignore[no-untyped-def]
        from edgespec.core.sampling import draw
        from edgespec.core.verdict import Verdict

        if len(draft) and int(draft.token_ids[0]) == int(logits.row(0).argmax()):
            return Verdict((0,), draw(np.exp(state.law(logits.row(1)).astype(np.float64)), rng), "bonus")
        return Verdict((), draw(np.exp(state.law(logits.row(0)).astype(np.float64)), rng), "correction")


def test_esb_22_the_check_catches_the_biased_rule() -> None:
    frequencies, _ = first_tokens(Sampling(temperature=1.0), KeepIfArgmax())
    assert np.abs(frequencies - [0.629, 0.188, 0.114, 0.069]).max() < 0.015
    assert np.abs(frequencies - [0.5793, 0.2131, 0.1293, 0.0784]).max() > 0.04


def test_esb_21c_equal_laws_leave_no_residual() -> None:
    rounds = run_rounds(
        fixed_dist(FIXED_TARGET),
        ModelDrafter(fixed_dist(FIXED_TARGET)),
        [0],
        n=4000,
        k=7,
        sampling=Sampling(temperature=0.7),
        verify=RejectionVerifier(),
    )
    assert sum(r.trace.drafted for r in rounds) == sum(r.trace.kept for r in rounds) == 3500
