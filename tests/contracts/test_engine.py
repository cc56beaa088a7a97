"""What every engine promises, whatever computes it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edgespec.core.cancel import CancelToken
from edgespec.core.draft import path_to
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import Cancelled, DeviceError

PROMPT = [5, 9, 2, 7, 7, 1, 30, 12, 4, 3, 21]  # longer than the tiny sliding window


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def needs_paths(subject):
    if subject.engine.capabilities.rollback == "tail":
        pytest.skip(f"{subject.case.name} scores chains only")


def test_spec_says_what_the_config_says(subject):
    spec, config = subject.engine.spec, subject.config
    assert (spec.layers, spec.hidden, spec.max_context) == (config.layers, config.hidden, config.max_context)
    assert spec.vocab_size == subject.reference.spec.vocab_size < config.vocab_rows
    assert spec.weight_bytes > 0
    assert spec.kv_bytes_per_token > 0


def test_logits_agree_with_the_reference(subject):
    batch = TokenBatch.chain(PROMPT)
    expected = subject.reference.forward([(batch, subject.reference.new_cache(64))])[0].logits
    actual = subject.logits(subject.engine.new_cache(64), batch)
    for i in range(len(PROMPT)):
        np.testing.assert_allclose(actual[i], expected.row(i), rtol=0, atol=subject.case.atol_reference)


def test_only_the_last_scored_rows_come_back(subject):
    cache = subject.prefilled(PROMPT)
    tokens = [8, 6, 11, 40]
    whole = subject.logits(cache, TokenBatch.chain(tokens))
    assert whole.shape == (4, subject.engine.spec.vocab_size)
    assert whole.dtype == np.float32
    for scored in (1, 3):
        subject.close_to(subject.logits(cache, TokenBatch.chain(tokens, scored=scored)), whole[4 - scored :])
    assert len(subject.engine.forward([(TokenBatch.chain(tokens, scored=0), cache)])[0].logits) == 0


def test_questions_about_logits_agree_with_each_other(subject):
    logits = subject.engine.forward([(TokenBatch.chain(PROMPT), subject.engine.new_cache(64))])[0].logits
    rows = np.stack([logits.row(i).copy() for i in range(len(logits))])
    argmax = logits.argmax()
    assert argmax.dtype == np.int32
    np.testing.assert_array_equal(argmax, rows.argmax(-1))
    ids = np.arange(len(PROMPT), dtype=np.int32) * 3
    np.testing.assert_array_equal(logits.gather(ids), rows[np.arange(len(PROMPT)), ids])


def test_forward_changes_nothing_until_commit(subject):
    cache = subject.prefilled(PROMPT)
    first = subject.logits(cache, TokenBatch.chain([8]))
    subject.engine.forward([(TokenBatch.chain([40, 41, 42, 43, 44]), cache)])
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([8])), first)


def test_commit_keeps_a_prefix_of_a_chain(subject):
    cache = subject.prefilled(PROMPT)
    subject.engine.forward([(TokenBatch.chain([8, 6, 11, 40]), cache)])
    cache.commit([0, 1])
    assert cache.length == len(PROMPT) + 2
    subject.close_to(subject.logits(cache, TokenBatch.chain([13]))[0], subject.scratch([*PROMPT, 8, 6, 13]))


def test_commit_of_nothing_drops_the_batch(subject):
    cache = subject.prefilled(PROMPT)
    subject.engine.forward([(TokenBatch.chain([8, 6]), cache)])
    cache.commit([])
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([13]))[0], subject.scratch([*PROMPT, 13]))


def test_a_tree_row_equals_its_path_as_a_chain(subject, rng):
    needs_paths(subject)
    cache = subject.prefilled(PROMPT)
    for n in (2, 5, 12):
        batch = subject.random_batch(rng, n)
        rows = subject.logits(cache, batch)
        for node in range(n):
            path = batch.token_ids[path_to(batch.parents, node)].tolist()
            subject.close_to(rows[node], subject.scratch([*PROMPT, *path]))


def test_commit_of_a_side_branch(subject):
    needs_paths(subject)
    cache = subject.prefilled(PROMPT)
    #  0 ── 2 ── 4        the path 1, 3, 5 is scattered over the rows
    #  1 ── 3 ── 5
    batch = TokenBatch(np.array([8, 6, 11, 40, 13, 22], np.int32), np.array([-1, -1, 0, 1, 2, 3], np.int32))
    subject.engine.forward([(batch, cache)])
    cache.commit([1, 3, 5])
    subject.close_to(subject.logits(cache, TokenBatch.chain([17]))[0], subject.scratch([*PROMPT, 6, 40, 22, 17]))


def test_truncate_forgets_the_end(subject):
    cache = subject.prefilled([*PROMPT, 50, 51, 52, 53])
    cache.truncate(len(PROMPT))
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([8]))[0], subject.scratch([*PROMPT, 8]))
    cache.truncate(0)
    assert cache.length == 0
    subject.close_to(subject.logits(cache, TokenBatch.chain([8]))[0], subject.scratch([8]))


def test_truncate_beyond_what_is_there_is_refused(subject):
    cache = subject.prefilled(PROMPT)
    for length in (len(PROMPT) + 1, -1):
        with pytest.raises(ValueError):
            cache.truncate(length)
    assert cache.length == len(PROMPT)


@pytest.mark.parametrize("nodes", [[1], [0, 2], [0, 1, 3], [0, 0], [5], [-1], [1, 0]])
def test_commit_of_what_is_no_path_is_refused(subject, nodes):
    cache = subject.prefilled(PROMPT)
    subject.engine.forward([(TokenBatch.chain([8, 6, 11, 40]), cache)])
    with pytest.raises(ValueError):
        cache.commit(nodes)
    assert cache.length == len(PROMPT)


def test_commit_needs_a_forward_pass(subject):
    cache = subject.engine.new_cache(16)
    with pytest.raises(ValueError):
        cache.commit([])
    subject.engine.forward([(TokenBatch.chain([1]), cache)])
    cache.commit([0])
    with pytest.raises(ValueError):
        cache.commit([0])


def test_truncate_drops_the_last_batch(subject):
    cache = subject.prefilled(PROMPT)
    subject.engine.forward([(TokenBatch.chain([8]), cache)])
    cache.truncate(3)
    with pytest.raises(ValueError):
        cache.commit([0])


def test_ids_outside_the_vocabulary_are_refused_padding_rows_too(subject):
    cache = subject.prefilled(PROMPT)
    for bad in (-1, subject.engine.spec.vocab_size, subject.config.vocab_rows):
        with pytest.raises(ValueError):
            subject.engine.forward([(TokenBatch.chain([1, bad]), cache)])
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([8]))[0], subject.scratch([*PROMPT, 8]))


def test_capacity_can_be_used_to_the_last_token_and_no_further(subject):
    cache = subject.engine.new_cache(len(PROMPT))
    assert cache.capacity == len(PROMPT)
    subject.engine.forward([(TokenBatch.chain(PROMPT[:-1], scored=0), cache)])
    cache.commit(range(len(PROMPT) - 1))
    with pytest.raises(ValueError):
        subject.engine.forward([(TokenBatch.chain([1, 2]), cache)])
    subject.close_to(subject.logits(cache, TokenBatch.chain(PROMPT[-1:]))[0], subject.scratch(PROMPT))
    cache.commit([0])
    assert cache.length == cache.capacity


def test_caches_beyond_the_models_context_are_refused(subject):
    most = subject.engine.spec.max_context
    assert subject.engine.new_cache(most).capacity == most
    with pytest.raises(ValueError):
        subject.engine.new_cache(most + 1)
    with pytest.raises(ValueError):
        subject.engine.new_cache(0)


def test_several_caches_do_not_touch_each_other(subject, rng):
    contexts = [subject.random_tokens(rng, n) for n in (3, 12, 7)]
    caches = [subject.prefilled(tokens) for tokens in contexts]
    for _ in range(2):
        for tokens, cache in zip(contexts, caches, strict=True):
            token = subject.random_tokens(rng, 1)
            subject.close_to(subject.logits(cache, TokenBatch.chain(token))[0], subject.scratch(tokens + token))
            cache.commit([0])
            tokens += token


def test_several_sequences_in_one_pass(subject, rng):
    if subject.engine.capabilities.max_sequences < 2:
        pytest.skip(f"{subject.case.name} takes one sequence a pass")
    contexts = [subject.random_tokens(rng, n) for n in (4, 11)]
    caches = [subject.prefilled(tokens) for tokens in contexts]
    batches = [subject.random_batch(rng, n) for n in (3, 2)]
    alone = [subject.logits(cache, batch) for cache, batch in zip(caches, batches, strict=True)]
    together = subject.engine.forward(list(zip(batches, caches, strict=True)))
    for rows, scores in zip(alone, together, strict=True):
        subject.close_to(np.stack([scores.logits.row(i) for i in range(len(rows))]), rows)
    caches[1].commit([0])
    assert [cache.length for cache in caches] == [4, 12]


def test_features_are_the_hidden_states_of_every_row(subject):
    if not subject.engine.capabilities.features:
        pytest.skip(f"{subject.case.name} exposes no features")
    batch = TokenBatch.chain(PROMPT, scored=1)
    cache = subject.engine.new_cache(64)
    assert subject.engine.forward([(batch, cache)])[0].features is None
    features = np.asarray(subject.engine.forward([(batch, cache)], features=True)[0].features)
    expected = subject.reference.forward([(batch, subject.reference.new_cache(64))], features=True)[0].features
    assert features.shape == (len(PROMPT), subject.config.hidden)
    np.testing.assert_allclose(features, expected, rtol=0, atol=max(subject.case.atol_reference, 1e-6) * 10)


def test_width_does_not_change_a_bit(subject, rng):
    if not subject.engine.capabilities.width_invariant:
        pytest.skip(f"{subject.case.name} does not promise it")
    tokens = subject.random_tokens(rng, 40)
    cache = subject.engine.new_cache(64)
    plain = []
    for token in tokens:
        plain.append(subject.logits(cache, TokenBatch.chain([token]))[0])
        cache.commit([0])
    for width in range(1, 17):
        cache.truncate(0)
        for start in range(0, 40, width):
            part = tokens[start : start + width]
            np.testing.assert_array_equal(subject.logits(cache, TokenBatch.chain(part)), plain[start : start + width])
            cache.commit(range(len(part)))


def test_cancelled_before_it_starts_leaves_the_cache_as_it_was(subject):
    cache = subject.prefilled(PROMPT)
    token = CancelToken()
    token.cancel()
    with pytest.raises(Cancelled):
        subject.engine.forward([(TokenBatch.chain([8, 6]), cache)], cancel=token)
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([8]))[0], subject.scratch([*PROMPT, 8]))


def test_cancelled_on_the_way_leaves_the_cache_as_it_was(subject):
    cache = subject.engine.new_cache(subject.engine.spec.max_context)
    subject.engine.forward([(TokenBatch.chain(PROMPT, scored=0), cache)])
    cache.commit(range(len(PROMPT)))
    token = CancelOnSecondLook()
    with pytest.raises(Cancelled):
        subject.engine.forward([(TokenBatch.chain([8] * 200), cache)], cancel=token)
    assert cache.length == len(PROMPT)
    subject.close_to(subject.logits(cache, TokenBatch.chain([8]))[0], subject.scratch([*PROMPT, 8]))


class CancelOnSecondLook(CancelToken):
    """Set as soon as the engine looks at it for the second time, or watches it: always after the pass has begun."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    @property
    def cancelled(self):
        self._look()
        return super().cancelled

    def check(self):
        self._look()
        super().check()

    def watch(self, interrupt):
        threading.Timer(0.001, self.cancel).start()
        return super().watch(interrupt)

    def _look(self):
        self.looks += 1
        if self.looks == 2:
            self.cancel()


def test_copies_to_the_host_are_counted_and_never_shrink(subject):
    cache = subject.prefilled(PROMPT)
    before = cache.host_bytes_copied
    logits = subject.engine.forward([(TokenBatch.chain([8, 6]), cache)])[0].logits
    logits.argmax()
    cache.commit([0])
    assert cache.host_bytes_copied >= before >= 0
    if subject.engine.capabilities.unit == "cpu":
        assert cache.host_bytes_copied == 0
    assert cache.nbytes > 0


def test_threads_may_share_an_engine(subject, rng):
    contexts = [subject.random_tokens(rng, 9) for _ in range(3)]
    expected = [subject.scratch(tokens) for tokens in contexts]
    rows: list[np.ndarray | None] = [None] * 3

    def work(i: int) -> None:
        cache = subject.engine.new_cache(16)
        for token in contexts[i]:
            rows[i] = subject.logits(cache, TokenBatch.chain([token]))[0]
            cache.commit([0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, scratch in zip(rows, expected, strict=True):
        assert row is not None
        subject.close_to(row, scratch)


def test_engines_of_the_same_files_agree_bit_for_bit(subject):
    again = subject.fresh()
    batch = TokenBatch.chain(PROMPT)
    rows = again.forward([(batch, again.new_cache(64))])[0].logits
    np.testing.assert_array_equal(rows.row(10), subject.logits(subject.engine.new_cache(64), batch)[10])
    again.close()


def test_a_closed_engine_says_so(subject):
    engine = subject.fresh()
    cache = engine.new_cache(8)
    for _ in range(2):
        engine.close()
        with pytest.raises(DeviceError, match="closed"):
            engine.forward([(TokenBatch.chain([1]), cache)])
