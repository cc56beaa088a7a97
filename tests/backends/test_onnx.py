from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec.backends import onnx as backend
from edgespec.backends.onnx import BACKEND
from edgespec.backends.onnx_engine import OnnxEngine, library_errors
from edgespec.core.cancel import CancelToken
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError, Cancelled, ContractError, DeviceError
from edgespec_converters.recipes import Format, Recipe
from edgespec_converters.targets import onnx as target
from tests.helpers.engines import make_onnx
from tests.helpers.packages import write_package
from tests.helpers.tiny import tiny_checkpoint, tiny_config

INVARIANT = [Format(8, 32), Format(8, 64), Format(4, 32), Format(4, 32, symmetric=False)]
WIDTH_CONTEXT = 100


def small(family="qwen2", **overrides):
    """Rows long enough for blocks of 64."""
    return tiny_checkpoint(tiny_config(family, hidden=128, ffn=192, head_dim=16, **overrides))


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, n).astype(np.int32) % 250


@pytest.fixture(
    scope="module",
    params=[*(("qwen2", format) for format in INVARIANT), *((family, Format(8, 64)) for family in ("llama", "qwen3", "gemma3"))],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def quantised(request, tmp_path_factory) -> OnnxEngine:
    family, format = request.param
    return make_onnx(small(family), tmp_path_factory.mktemp("onnx"), Recipe("quantised", format))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> OnnxEngine:
    return make_onnx(small(), tmp_path_factory.mktemp("onnx"), Recipe("int8", Format(8, 64)))


def score(engine: OnnxEngine, cache, batch: TokenBatch) -> np.ndarray:
    logits = engine.forward([(batch, cache)])[0].logits
    return np.stack([logits.row(i).copy() for i in range(len(logits))])


def prefilled(engine: OnnxEngine, ids: np.ndarray, capacity: int = 128, chunk: int = 64):
    cache = engine.new_cache(capacity)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        engine.forward([(TokenBatch.chain(part, scored=0), cache)])
        cache.commit(range(len(part)))
    return cache


# -- bits -------------------------------------------------------------------------------------------------------------


def test_logits_and_kv_have_the_same_bits_for_every_width(quantised):
    assert quantised.capabilities.width_invariant
    context, following = tokens(WIDTH_CONTEXT), tokens(16, seed=1)
    plain = prefilled(quantised, context)
    rows = []
    for token in following:
        rows.append(score(quantised, plain, TokenBatch.chain([token]))[0])
        plain.commit([0])
    for width in range(2, 17):
        wide = prefilled(quantised, context)
        np.testing.assert_array_equal(score(quantised, wide, TokenBatch.chain(following[:width])), np.stack(rows[:width]))
        end = WIDTH_CONTEXT + width
        np.testing.assert_array_equal(wide.kv[..., :end, :], plain.kv[..., :end, :])


@pytest.mark.parametrize("chunk", [1, 2, 7, 32, 99])
def test_the_kv_has_the_same_bits_for_every_prefill_chunk(quantised, chunk):
    ids = tokens(WIDTH_CONTEXT)
    whole, chunked = prefilled(quantised, ids, chunk=WIDTH_CONTEXT), prefilled(quantised, ids, chunk=chunk)
    np.testing.assert_array_equal(chunked.kv[..., :WIDTH_CONTEXT, :], whole.kv[..., :WIDTH_CONTEXT, :])


def test_the_first_path_of_a_tree_has_the_bits_of_a_chain(quantised):
    cache = prefilled(quantised, tokens(40))
    following = tokens(7, seed=2)
    chain = score(quantised, cache, TokenBatch.chain(following[:4]))
    tree = score(quantised, cache, TokenBatch(following, np.array([-1, 0, 1, 2, -1, 4, 0], np.int32)))
    np.testing.assert_array_equal(tree[:4], chain)
    cache.commit(range(4))
    again = score(quantised, cache, TokenBatch.chain([5]))
    chained = prefilled(quantised, np.concatenate([tokens(40), following[:4]]))
    np.testing.assert_array_equal(again, score(quantised, chained, TokenBatch.chain([5])))


def test_capacity_does_not_change_a_bit(engine):
    ids = tokens(50)
    small_cache, large_cache = prefilled(engine, ids, capacity=64), prefilled(engine, ids, capacity=256)
    np.testing.assert_array_equal(
        score(engine, small_cache, TokenBatch.chain([1, 2])), score(engine, large_cache, TokenBatch.chain([1, 2]))
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def test_kv_and_logits_are_never_copied(engine):
    cache = engine.new_cache(64)
    for array in (cache.kv, cache.kv[3]):
        assert engine.value(array).data_ptr() == array.ctypes.data
    logits = engine.forward([(TokenBatch.chain(tokens(5)), cache)])[0].logits
    assert np.any(cache.kv[:, :, :, 4] != 0)  # written in place
    row = logits.row(4)
    engine.forward([(TokenBatch.chain(tokens(5, seed=3)), cache)])
    assert np.shares_memory(row, engine.forward([(TokenBatch.chain(tokens(5)), cache)])[0].logits.row(4))
    cache.commit(range(5))
    assert cache.host_bytes_copied == 0


def test_a_value_that_would_be_a_copy_is_refused(engine):
    with pytest.raises(ContractError, match="copied"):
        engine.value(np.zeros((4, 4), np.float32)[:, :2])


def test_committing_a_side_branch_counts_what_it_moves(engine):
    cache = prefilled(engine, tokens(10))
    engine.forward([(TokenBatch(tokens(4), np.array([-1, 0, 0, 2], np.int32)), cache)])
    cache.commit([0, 2, 3])  # row 0 stays, two rows move
    assert cache.host_bytes_copied == 2 * engine.spec.kv_bytes_per_token


def test_a_shape_is_bound_once(engine, monkeypatch):
    cache = prefilled(engine, tokens(10))
    score(engine, cache, TokenBatch.chain([1]))
    made = []
    original = engine.new_binding
    monkeypatch.setattr(engine, "new_binding", lambda: made.append(1) or original())
    for _ in range(3):
        score(engine, cache, TokenBatch.chain([1]))
        cache.commit([0])
    assert not made
    score(engine, cache, TokenBatch.chain([1, 2]))
    assert len(made) == 1


def test_batches_may_outgrow_the_first_buffers(engine):
    ids = tokens(200)
    cache = engine.new_cache(256)
    rows = score(engine, cache, TokenBatch.chain(ids))
    assert rows.shape == (200, engine.spec.vocab_size)
    cache.commit(range(200))
    np.testing.assert_array_equal(
        score(engine, cache, TokenBatch.chain([3])), score(engine, prefilled(engine, ids, 256), TokenBatch.chain([3]))
    )


def test_stale_rows_do_not_leak(engine):
    ids = tokens(30)
    expected = score(engine, prefilled(engine, ids), TokenBatch.chain([1, 2]))
    cache = prefilled(engine, ids)
    cache.kv[..., 30:, :] = np.nan
    np.testing.assert_array_equal(score(engine, cache, TokenBatch.chain([1, 2])), expected)
    tree = TokenBatch(tokens(3), np.array([-1, -1, 0], np.int32))
    cache.kv[..., 30:, :] = np.nan
    assert np.isfinite(score(engine, cache, tree)).all()


def test_a_long_prefill_runs_in_narrow_passes(engine, monkeypatch):
    ids = tokens(240)
    expected = score(engine, prefilled(engine, ids, capacity=256), TokenBatch.chain([1]))
    runs = []
    cache = engine.new_cache(256)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_session", Session(engine._session, lambda: runs.append(1)))
        assert len(engine.forward([(TokenBatch.chain(ids, scored=1), cache)])[0].logits) == 1
    assert len(runs) == 2
    cache.commit(range(240))
    np.testing.assert_array_equal(score(engine, cache, TokenBatch.chain([1])), expected)


# -- stopping and failing ---------------------------------------------------------------------------------------------


class Session:
    """The engine's session, with something happening just before it runs."""

    def __init__(self, session, before):
        self._session, self._before = session, before

    def io_binding(self):
        return self._session.io_binding()

    def run_with_iobinding(self, binding, options):
        self._before()
        self._session.run_with_iobinding(binding, options)


def test_a_pass_is_interrupted_inside_the_library(engine, monkeypatch):
    cache = prefilled(engine, tokens(10))
    expected = score(engine, cache, TokenBatch.chain([1]))
    token = CancelToken()

    def cancel_elsewhere():
        thread = threading.Thread(target=token.cancel)
        thread.start()
        thread.join()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_session", Session(engine._session, cancel_elsewhere))
        with pytest.raises(Cancelled) as caught:
            engine.forward([(TokenBatch.chain(tokens(20)), cache)], cancel=token)
        assert isinstance(caught.value.__context__, DeviceError)  # the library itself stopped
    assert cache.length == 10
    with pytest.raises(ValueError):
        cache.commit([0])
    np.testing.assert_array_equal(score(engine, cache, TokenBatch.chain([1])), expected)


@pytest.mark.parametrize("kind", [RuntimeError, *library_errors()], ids=lambda kind: kind.__name__)
def test_errors_of_the_library_become_device_errors(engine, monkeypatch, kind):
    def fail():
        raise kind("no")

    cache = engine.new_cache(8)
    monkeypatch.setattr(engine, "_session", Session(engine._session, fail))
    with pytest.raises(DeviceError, match="tiny-qwen2") as caught:
        engine.forward([(TokenBatch.chain([1]), cache)])
    assert isinstance(caught.value.__cause__, kind)


def test_a_pass_that_fails_before_it_runs_leaves_no_mask_behind(tmp_path, monkeypatch):
    """A tree's mask covers what both kinds of layers see; a chain that follows must not meet it."""
    engine = make_onnx(small("gemma3"), tmp_path, Recipe("int8", Format(8, 64)))
    context, chain = tokens(5), TokenBatch.chain([4, 8, 15, 16])
    tree = TokenBatch(np.array([1, 2, 3, 4], np.int32), np.array([-1, -1, -1, -1], np.int32))
    expected = score(engine, prefilled(engine, context), chain)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    cache = prefilled(engine, context)
    score(engine, cache, chain)
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.backends.onnx_engine._mask_windows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score(engine, cache, tree)
    np.testing.assert_array_equal(score(engine, cache, chain), expected)


def test_a_closed_engine_says_so(tmp_path):
    engine = make_onnx(small(), tmp_path)
    cache = engine.new_cache(8)
    engine.close()
    with pytest.raises(DeviceError, match="closed"):
        engine.forward([(TokenBatch.chain([1]), cache)])
    with pytest.raises(DeviceError, match="closed"):
        engine.new_cache(8)


def test_caches_of_another_engine_are_refused(engine, tmp_path):
    other = make_onnx(small(), tmp_path)
    with pytest.raises(ContractError):
        engine.forward([(TokenBatch.chain([1]), other.new_cache(8))])


def test_two_batches_for_one_cache_are_refused(engine):
    cache = engine.new_cache(8)
    with pytest.raises(ValueError, match="one batch per cache"):
        engine.forward([(TokenBatch.chain([1]), cache), (TokenBatch.chain([2]), cache)])


@pytest.mark.parametrize("harm", ["missing", "short", "garbage"])
def test_damaged_files_are_refused(tmp_path, harm):
    checkpoint = small()
    manifest = write_package(target, checkpoint, tmp_path, "int8")
    (artifact,) = manifest.artifacts
    graph, data = (tmp_path / artifact.folder / name for name in ("model.onnx", "model.data"))
    if harm == "missing":
        data.unlink()
    elif harm == "short":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        graph.write_bytes(b"\xff" * graph.stat().st_size)
    with pytest.raises(ArtifactError, match="convert or pull"):
        BACKEND.load(tmp_path, manifest, artifact)


def test_the_backend_says_why_it_cannot_work(monkeypatch):
    assert BACKEND.why_not() is None
    assert "ONNX Runtime" in BACKEND.describe()
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert "not installed" in (BACKEND.why_not() or "")


def test_importing_the_backend_loads_no_device_library():
    code = "import sys, edgespec.backends.onnx; sys.exit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


# -- what is computed ---------------------------------------------------------------------------------------------------


def test_equal_logits_give_the_lowest_id(tmp_path):
    checkpoint = small()
    checkpoint.tensors["lm_head.weight"][:] = 0
    engine = make_onnx(checkpoint, tmp_path, Recipe("int8", Format(8, 64)))
    logits = engine.forward([(TokenBatch.chain(tokens(3)), engine.new_cache(8))])[0].logits
    assert logits.argmax().tolist() == [0, 0, 0]


def test_esb_03_a_sliding_window_can_be_rewound_after_it_has_wrapped(tmp_path):
    engine = make_onnx(small("gemma3", sliding_window=8), tmp_path)
    prompt = tokens(6).tolist()

    def greedy(cache, batch: TokenBatch) -> list[int]:
        return engine.forward([(batch, cache)])[0].logits.argmax().tolist()

    plain, cache = list(prompt), prefilled(engine, tokens(5))
    for _ in range(40):
        plain.append(greedy(cache, TokenBatch.chain(plain[-1:]))[0])
        cache.commit([0])

    out, cache, rounds = list(prompt), prefilled(engine, tokens(5)), 0
    while len(out) < len(plain):
        draft = plain[len(out) : len(out) + 4]
        if rounds % 2:
            draft = [(token + 1) % 250 for token in draft]
        told = greedy(cache, TokenBatch.chain([out[-1], *draft]))
        kept = next((i for i, token in enumerate(draft) if token != told[i]), len(draft))
        cache.commit(range(kept + 1))
        out += told[: kept + 1]
        rounds += 1
    assert out[: len(plain)] == plain
    assert len(plain) > 5 * 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_weights_are_given_back_after_loading(tmp_path):
    engine = make_onnx(small(), tmp_path, Recipe("int8", Format(8, 64)))
    resident = []
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags"):
        if str(tmp_path) in entry:
            resident.append(int(entry.split("\nRss:")[1].split()[0]))
    assert resident and sum(resident) == 0
    assert np.isfinite(score(engine, engine.new_cache(8), TokenBatch.chain([1]))).all()


def test_a_graph_of_another_version_is_refused_with_the_command_that_mends_it(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    manifest = write_package(target, checkpoint, tmp_path, "float32")
    path = tmp_path / manifest.artifacts[0].folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    next(value for value in model.graph.input if value.name == "rows").name = "scored"
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "rows":
                node.input[i] = "scored"
    path.write_bytes(model.SerializeToString())
    record = replace(next(iter(manifest.artifacts[0].files.values())), nbytes=path.stat().st_size)
    artifact = replace(manifest.artifacts[0], files={f"{manifest.artifacts[0].folder}/model.onnx": record})
    with pytest.raises(ArtifactError, match="another version of edgespec; run: edgespec pull"):
        BACKEND.load(tmp_path, manifest, artifact)
