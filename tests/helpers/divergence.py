"""The two-part check for engines that round differently at different widths: is a divergence rounding, or a fault?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.core.engine import Engine, TokenBatch


def check_divergence(
    engine: Engine, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int], *, tolerance: float
) -> int | None:
    """None if the two answers agree. Else the first position where they differ, which must be a near-tie: re-scored from an empty
    cache, as one row and as several, the two choices are the two best and lie within `tolerance` logits. AssertionError otherwise.
    """
    pairs = zip(plain, speculative, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        assert len(plain) == len(speculative)
        return None
    prefix = [*prompt, *plain[:at]]
    tail = min(4, len(prefix) - 1)
    one = _last_row(engine, prefix, rows=1)
    several = _last_row(engine, prefix, rows=1 + tail)
    assert np.abs(one - several).max() <= tolerance, "one row and several disagree by more than rounding"
    assert int(one.argmax()) == plain[at], "plain decoding did not emit its own argmax: its cache is wrong"
    gap = float(one[plain[at]] - one[speculative[at]])
    assert gap <= tolerance, (
        f"token {at}: the speculative choice lies {gap:.3f} below the best, more than {tolerance}: a cache or accept fault"
    )
    return at


def _last_row(engine: Engine, prefix: Sequence[int], *, rows: int) -> np.ndarray:
    """Logits [V] after the prefix, whose last `rows` tokens are scored in one pass on a fresh cache."""
    cache = engine.new_cache(len(prefix))
    if len(prefix) > rows:
        engine.forward([(TokenBatch.chain(prefix[:-rows], scored=0), cache)])
        cache.commit(range(len(prefix) - rows))
    (scores,) = engine.forward([(TokenBatch.chain(prefix[-rows:], scored=1), cache)])
    return np.array(scores.logits.row(0))
