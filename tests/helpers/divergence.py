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


def tree_rounding(engine: Engine, token_ids: Sequence[int], rng: np.random.Generator, *, read_as_tree: int = 12) -> float:
    """Largest change of the last token's logits when the last tokens are read along side branches instead of as a chain.

    The path is the same, only its rows lie apart, with wrong siblings between them. In exact arithmetic nothing changes; what an
    engine with 8-bit activations shows here is its rounding, and the yardstick for `check_divergence` on trees.
    """
    cache = engine.new_cache(len(token_ids) + 8)
    at = len(token_ids) - read_as_tree
    engine.forward([(TokenBatch.chain(token_ids[:at], scored=0), cache)])
    cache.commit(range(at))
    last_row = np.empty(0)
    while at < len(token_ids):
        tokens, parents, path = list[int](), list[int](), list[int]()
        while len(tokens) < 8 and at < len(token_ids):
            if rng.random() < 0.5:
                parents.append(int(rng.integers(-1, len(tokens))) if tokens else -1)
                tokens.append(int(rng.integers(0, engine.spec.vocab_size)))
            else:
                parents.append(path[-1] if path else -1)
                path.append(len(tokens))
                tokens.append(token_ids[at])
                at += 1
        (scores,) = engine.forward([(TokenBatch(np.array(tokens, np.int32), np.array(parents, np.int32)), cache)])
        if path:
            last_row = np.array(scores.logits.row(path[-1]))
        cache.commit(path)
    return float(np.abs(last_row - _last_row(engine, token_ids, rows=1)).max())


def _last_row(engine: Engine, prefix: Sequence[int], *, rows: int) -> np.ndarray:
    """Logits [V] after the prefix, whose last `rows` tokens are scored in one pass on a fresh cache."""
    cache = engine.new_cache(len(prefix))
    if len(prefix) > rows:
        engine.forward([(TokenBatch.chain(prefix[:-rows], scored=0), cache)])
        cache.commit(range(len(prefix) - rows))
    (scores,) = engine.forward([(TokenBatch.chain(prefix[-rows:], scored=1), cache)])
    return np.array(scores.logits.row(0))
