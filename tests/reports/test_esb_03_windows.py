"""ESB-03: a sliding window that has wrapped can be rewound, on every engine, and a rewind never does nothing in silence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edgespec.core.engine import TokenBatch
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.none import NoDrafter
from tests.helpers.divergence import check_divergence
from tests.helpers.engines import ENGINES, EngineCase, make_mlx, make_onnx, make_reference
from tests.helpers.hostile import WrongEverySecondRound
from tests.helpers.tiny import tiny_checkpoint, tiny_config
from tests.helpers.toyloop import run_ids, run_rounds

INT8 = {"mlx": partial(make_mlx, recipe="int8"), "onnx": partial(make_onnx, recipe="int8")}
PROMPT = [5, 9, 33, 70, 2, 81]


QUANTISED = [replace(case, name=f"{case.name}-int8", make=make) for case in ENGINES if (make := INT8.get(case.name))]


@pytest.mark.parametrize("case", [*ENGINES, *QUANTISED], ids=lambda case: case.name)
def test_esb_03_refusals_past_the_window_leave_the_answer(case: EngineCase, tmp_path: Path) -> None:
    """Window 8, prompt 6, 40 tokens, 4 guesses a round, all of them wrong in every second round."""
    if reason := case.backend.why_not():
        pytest.skip(reason)
    checkpoint = tiny_checkpoint(tiny_config("gemma3"))
    assert checkpoint.config.sliding_window == 8
    engine = case.make(checkpoint, tmp_path)
    plain = run_ids(engine, NoDrafter(), PROMPT, n=40, k=0, capacity=64)
    drafter = WrongEverySecondRound(ModelDrafter(make_reference(checkpoint, tmp_path)), engine.spec.vocab_size)
    rounds = run_rounds(engine, drafter, PROMPT, n=40, k=4, capacity=64)
    assert {round.trace.kept for round in rounds[1::2]} == {0}
    assert max(round.trace.kept for round in rounds[0::2]) > 0
    ids = [token for round in rounds for token in round.token_ids]
    if engine.capabilities.width_invariant:
        assert ids == plain
    else:
        check_divergence(engine, PROMPT, plain, ids, tolerance=1e-3)


@pytest.mark.parametrize("case", ENGINES, ids=lambda case: case.name)
def test_esb_03_a_rewind_is_checked(case: EngineCase, tmp_path: Path) -> None:
    if reason := case.backend.why_not():
        pytest.skip(reason)
    engine = case.make(tiny_checkpoint(tiny_config("gemma3", layers=2)), tmp_path)
    cache = engine.new_cache(32)
    engine.forward([(TokenBatch.chain(range(20), scored=0), cache)])
    cache.commit(range(20))
    cache.truncate(9)
    assert cache.length == 9
    with pytest.raises(ValueError):
        cache.truncate(10)
    assert cache.length == 9
