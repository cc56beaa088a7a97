"""Promise 1 on whole decoders with random weights: exact with hostile trees on the reference engine, rounding only elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.core.decoder import FAMILIES, Family
from edgespec.drafting.none import NoDrafter
from tests.helpers.divergence import check_divergence
from tests.helpers.engines import ENGINES, EngineCase
from tests.helpers.hostile import SpoilingDrafter
from tests.helpers.tiny import tiny_checkpoint, tiny_config
from tests.helpers.toyloop import run_ids
from tests.helpers.toys import AdversaryDrafter

PROMPT = [5, 9, 33, 70, 2, 81, 81, 40]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_greedy_answers_survive_hostile_trees(case: EngineCase, family: Family, tmp_path: Path) -> None:
    if (why := case.backend.why_not()) is not None:
        pytest.skip(why)
    engine = case.make(tiny_checkpoint(tiny_config(family)), tmp_path)
    plain = run_ids(engine, NoDrafter(), PROMPT, n=20, k=0, capacity=64)
    answers = {tuple(PROMPT): plain}
    drafters = [
        AdversaryDrafter(engine.spec.vocab_size),
        SpoilingDrafter(answers, engine.spec.vocab_size),
        SpoilingDrafter(answers, engine.spec.vocab_size, tree=True),
    ]
    for drafter in drafters:
        for seed in range(4):
            ids = run_ids(engine, drafter, PROMPT, n=20, k=7, seed=seed, capacity=64)
            if case.name == "reference":
                assert ids == plain
            else:
                check_divergence(engine, PROMPT, plain, ids, tolerance=1e-3)
