"""What MLX does beyond the engine contract. These tests run on Metal too, where there is some; here they ran on the CPU only."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edgespec.backends.mlx import BACKEND
from edgespec.backends.reference import BACKEND as REFERENCE
from edgespec.core.cancel import CancelToken
from edgespec.core.decoder import FAMILIES, RopeScaling
from edgespec.core.draft import depths, path_to
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError, Cancelled, CapabilityError, ContractError, DeviceError
from edgespec_converters.recipes import Format, Recipe
from edgespec_converters.targets import mlx as target
from tests.helpers.packages import write_package
from tests.helpers.tiny import tiny_checkpoint, tiny_config

needs_mlx = pytest.mark.skipif(BACKEND.why_not() is not None, reason=BACKEND.why_not() or "")

#  0 ─┬─ 1 ── 3
#     └─ 2 ─┬─ 4 ── 6
#           └─ 5
TREE = TokenBatch(np.array([8, 6, 11, 40, 13, 22, 9], np.int32), np.array([-1, 0, 0, 1, 2, 2, 4], np.int32))
ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 2, 7, 7, 1, 30, 12, 4, 3, 21]


def load(folder, checkpoint, recipe="float32", backend=BACKEND):
    manifest = write_package(target, checkpoint, folder, recipe)
    return backend.load(folder, manifest, manifest.artifacts[0])


@pytest.fixture
def engine(tmp_path):
    return load(tmp_path, tiny_checkpoint(tiny_config("llama")))


def prefilled(engine, tokens, capacity=64):
    cache = engine.new_cache(capacity)
    engine.forward([(TokenBatch.chain(tokens, scored=0), cache)])
    cache.commit(range(len(tokens)))
    return cache


def rows(engine, batch, cache):
    logits = engine.forward([(batch, cache)])[0].logits
    return np.stack([logits.row(i).copy() for i in range(len(logits))])


def addresses(cache):
    return [np.asarray(a).ctypes.data for a in (*cache.keys, *cache.values)]


@needs_mlx
@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_weights_mean_the_same_as_to_the_reference(tmp_path, family, recipe):
    checkpoint = tiny_checkpoint(tiny_config(family))
    ours, reference = load(tmp_path, checkpoint, recipe), load(tmp_path, checkpoint, recipe, REFERENCE)
    a, b = prefilled(ours, PROMPT), prefilled(reference, PROMPT)
    np.testing.assert_allclose(rows(ours, TREE, a), rows(reference, TREE, b), rtol=0, atol=1e-4)


@needs_mlx
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rope_agrees_with_the_reference_in_chains_and_trees(tmp_path, kind):
    checkpoint = tiny_checkpoint(tiny_config("llama", rope_scaling=RopeScaling(kind=kind, factor=4.0, original_context=32)))
    ours, reference = load(tmp_path, checkpoint), load(tmp_path, checkpoint, backend=REFERENCE)
    a, b = prefilled(ours, PROMPT * 5), prefilled(reference, PROMPT * 5)
    for batch in (TREE, TokenBatch.chain(PROMPT[:5])):
        np.testing.assert_allclose(rows(ours, batch, a), rows(reference, batch, b), rtol=0, atol=1e-4)


@needs_mlx
def test_esb_03_a_window_that_has_passed_rewinds(tmp_path):
    """Window 8, prompt 6: every second round the draft is refused, and each pass equals one from scratch."""
    engine = load(tmp_path, tiny_checkpoint(tiny_config("gemma3")))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.spec.vocab_size, 6).tolist()
    cache = prefilled(engine, tokens)
    for step in range(20):
        draft = rng.integers(0, engine.spec.vocab_size, 5).tolist()
        scored = rows(engine, TokenBatch.chain(draft), cache)
        keep = 1 if step % 2 else 3
        cache.commit(range(keep))
        tokens += draft[:keep]
        scratch = rows(engine, TokenBatch.chain(tokens, scored=1), engine.new_cache(64))
        np.testing.assert_allclose(scored[keep - 1], scratch[0], rtol=0, atol=1e-4)
    assert cache.length == len(tokens) > 40


@needs_mlx
def test_esb_09_a_tree_that_differs_from_plain_decoding_does_so_by_rounding(tmp_path):
    """Two parts: a row of the tree repeats when its context is scored anew in one pass of the same width; and against one row at a
    time only near-ties may choose differently."""
    engine = load(tmp_path, tiny_checkpoint(tiny_config("qwen2")), "int8")
    cache = prefilled(engine, PROMPT)
    tree = rows(engine, TREE, cache)
    again = rows(engine, TREE, prefilled(engine, PROMPT))
    np.testing.assert_array_equal(tree, again)
    for node in range(len(TREE)):
        path = TREE.token_ids[path_to(TREE.parents, node)].tolist()
        plain_cache = engine.new_cache(64)
        for token in [*PROMPT, *path]:
            plain = rows(engine, TokenBatch.chain([token]), plain_cache)[0]
            plain_cache.commit([0])
        chosen, other = int(tree[node].argmax()), int(plain.argmax())
        assert plain[other] - plain[chosen] <= 1e-4


@needs_mlx
def test_keys_and_values_are_written_rolled_back_and_compacted_in_place(engine):
    cache = prefilled(engine, PROMPT)
    before = addresses(cache)
    for keep in ([0, 2, 4, 6], [0, 1], [0, 2, 5], [], [0, 2, 4, 6], [0, 2, 5], [0, 2, 4, 6], [0, 2, 5]):
        engine.forward([(TREE, cache)])
        cache.commit(keep)
        engine.forward([(TokenBatch.chain([3]), cache)])
        cache.commit([0])
    cache.truncate(4)
    engine.forward([(TokenBatch.chain([3, 4, 5]), cache)])
    assert addresses(cache) == before
    assert cache.host_bytes_copied == 0


@needs_mlx
def test_a_committed_side_branch_moves_its_rows_and_no_others(engine):
    cache = prefilled(engine, PROMPT)
    engine.forward([(TREE, cache)])
    n, path = len(PROMPT), [0, 2, 4, 6]
    before = [np.array(a) for a in (*cache.keys, *cache.values)]
    cache.commit(path)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[:, :, :n], old[:, :, :n])
        np.testing.assert_array_equal(np.asarray(new)[:, :, n : n + 4], old[:, :, [n + node for node in path]])


@needs_mlx
def test_the_cache_grows_with_its_content_and_keeps_it(tmp_path):
    engine = load(tmp_path, tiny_checkpoint(tiny_config("llama", max_context=1000)))
    cache = engine.new_cache(1000)
    assert cache.nbytes == 0
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.spec.vocab_size, 600).tolist()
    sizes = []
    for start in range(0, 600, 100):
        last = rows(engine, TokenBatch.chain(tokens[start : start + 100], scored=1), cache)
        cache.commit(range(100))
        sizes.append(cache.nbytes // engine.spec.kv_bytes_per_token)
    assert sizes == [256, 256, 512, 512, 512, 1024]
    whole = rows(engine, TokenBatch.chain(tokens, scored=1), engine.new_cache(600))
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-4)


@needs_mlx
def test_logits_and_features_are_views_of_mlx_memory(engine):
    scores = engine.forward([(TREE, engine.new_cache(16))], features=True)[0]
    assert np.shares_memory(scores.logits.row(2), np.asarray(scores.logits.values))
    assert scores.logits.row(2).ctypes.data == scores.logits.row(0).ctypes.data + 2 * 4 * engine.spec.vocab_size
    view = np.asarray(scores.features)
    assert view.shape == (len(TREE), engine.spec.hidden)
    assert np.asarray(scores.features).ctypes.data == view.ctypes.data


@needs_mlx
def test_equal_logits_give_the_lowest_id_in_one_row_and_in_many(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    checkpoint.tensors["lm_head.weight"][:] = checkpoint.tensors["lm_head.weight"][:1]
    engine = load(tmp_path, checkpoint)
    cache = engine.new_cache(16)
    for batch in (TokenBatch.chain([3]), TokenBatch.chain([3] * 9)):
        assert engine.forward([(batch, cache)])[0].logits.argmax().tolist() == [0] * len(batch)


@needs_mlx
def test_esb_18_padding_rows_never_win(tmp_path):
    checkpoint = tiny_checkpoint(tiny_config("llama"))
    vocab_size = checkpoint.tokenizer.vocab_size
    checkpoint.tensors["lm_head.weight"][vocab_size:] *= 1000
    engine = load(tmp_path, checkpoint)
    logits = engine.forward([(TREE, engine.new_cache(16))])[0].logits
    assert logits.row(0).shape == (vocab_size,)
    assert logits.argmax().max() < vocab_size


class CancelAtLook(CancelToken):
    """Set when the engine looks for the `at`th time; counts the looks."""

    def __init__(self, at):
        super().__init__()
        self.at, self.looks = at, 0

    def check(self):
        self.looks += 1
        if self.looks == self.at:
            self.cancel()
        super().check()


@needs_mlx
def test_a_cancel_acts_between_the_layers_of_a_long_pass(engine):
    cache = prefilled(engine, PROMPT, 256)
    tokens = [7] * 100
    expected = rows(engine, TokenBatch.chain(tokens, scored=1), cache)
    for at in (1, 2, engine.spec.layers + 1):
        token = CancelAtLook(at)
        with pytest.raises(Cancelled):
            engine.forward([(TokenBatch.chain(tokens), cache)], cancel=token)
        assert token.looks == at
        assert cache.length == len(PROMPT)
    np.testing.assert_array_equal(rows(engine, TokenBatch.chain(tokens, scored=1), cache), expected)


@needs_mlx
def test_a_cancelled_pass_takes_the_place_of_the_one_before(engine):
    cache = prefilled(engine, PROMPT, 256)
    engine.forward([(TokenBatch.chain([3]), cache)])
    with pytest.raises(Cancelled):
        engine.forward([(TokenBatch.chain([7] * 100), cache)], cancel=CancelAtLook(2))
    with pytest.raises(ValueError, match="without a forward pass"):
        cache.commit([0])


@needs_mlx
def test_a_cache_wanders_between_threads(engine):
    """Each step in a thread of its own, side branches compacted and logits asked in yet others."""
    cache = prefilled(engine, PROMPT)
    tokens, results = list(PROMPT), {}

    def in_thread(name, work):
        def run():
            results[name] = work()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results.pop(name)

    for _ in range(3):
        scores = in_thread("score", lambda: engine.forward([(TREE, cache)])[0])
        best = in_thread("argmax", scores.logits.argmax)
        np.testing.assert_array_equal(
            in_thread("gather", lambda s=scores, b=best: s.logits.gather(b)), [scores.logits.row(i).max() for i in range(len(TREE))]
        )
        in_thread("commit", lambda: cache.commit([0, 2, 4]))
        tokens += TREE.token_ids[[0, 2, 4]].tolist()
    scratch = rows(engine, TokenBatch.chain([*tokens, 1], scored=1), engine.new_cache(64))
    np.testing.assert_allclose(rows(engine, TokenBatch.chain([1]), cache), scratch, rtol=0, atol=1e-4)


@needs_mlx
def test_two_engines_in_two_threads_take_turns_on_the_device(tmp_path, monkeypatch):
    from edgespec.backends.mlx_decoder import Decoder

    engines = [load(tmp_path / family, tiny_checkpoint(tiny_config(family))) for family in ("llama", "gemma3")]
    expected = [rows(e, TokenBatch.chain(PROMPT * 3), e.new_cache(64)) for e in engines]
    found, inside, most = [[], []], set(), []
    embed, logits = Decoder.embed, Decoder.logits

    def enter(self, token_ids):
        inside.add(self)
        most.append(len(inside))
        time.sleep(0.001)  # gives the other thread its chance
        return embed(self, token_ids)

    def leave(self, x):
        inside.discard(self)
        return logits(self, x)

    monkeypatch.setattr(Decoder, "embed", enter)
    monkeypatch.setattr(Decoder, "logits", leave)

    def work(i):
        for _ in range(5):
            found[i].append(rows(engines[i], TokenBatch.chain(PROMPT * 3), engines[i].new_cache(64)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 10
    for results, once in zip(found, expected, strict=True):
        assert len(results) == 5
        for result in results:
            np.testing.assert_array_equal(result, once)


@needs_mlx
def test_layers_of_mixed_formats_load(tmp_path):
    """ESB-63: groups and widths per layer, one of them in float; the reference goes by config.json, this engine by the shapes."""
    checkpoint = tiny_checkpoint(tiny_config("llama", ffn=80))
    recipe = Recipe("mixed", Format(4, 64, False))
    ours, reference = load(tmp_path, checkpoint, recipe), load(tmp_path, checkpoint, recipe, REFERENCE)
    a, b = prefilled(ours, PROMPT), prefilled(reference, PROMPT)
    np.testing.assert_allclose(rows(ours, TREE, a), rows(reference, TREE, b), rtol=0, atol=1e-4)


@needs_mlx
def test_damaged_and_foreign_files_are_refused(tmp_path):
    manifest = write_package(target, tiny_checkpoint(tiny_config("llama")), tmp_path, "int8")
    artifact = manifest.artifacts[0]
    weights = tmp_path / artifact.folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: it has \d+ bytes instead of \d+"):
        BACKEND.load(tmp_path, manifest, artifact)
    weights.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        BACKEND.load(tmp_path, manifest, artifact)
    weights.write_bytes(whole.replace(b"model.norm.weight", b"model.nose.weight"))
    with pytest.raises(ArtifactError, match=r"lack model\.norm\.weight"):
        BACKEND.load(tmp_path, manifest, artifact)
    weights.write_bytes(whole.replace(b"layers.1.mlp.up_proj.biases", b"layers.1.mlp.up_proj.mxfp4s"))
    with pytest.raises(ArtifactError, match="only affine"):
        BACKEND.load(tmp_path, manifest, artifact)
    weights.unlink()
    with pytest.raises(ArtifactError, match="missing"):
        BACKEND.load(tmp_path, manifest, artifact)


@needs_mlx
def test_tensors_of_another_shape_are_refused(tmp_path):
    wide = write_package(target, tiny_checkpoint(tiny_config("llama", ffn=128)), tmp_path, "int8")
    narrow = write_package(target, tiny_checkpoint(tiny_config("llama")), tmp_path / "narrow", "int8")
    with pytest.raises(ArtifactError, match=r"mlp\.gate_proj should have shape"):
        BACKEND.load(tmp_path, narrow, wide.artifacts[0])


@needs_mlx
def test_what_the_engine_cannot_do_is_refused(engine, tmp_path):
    cache = engine.new_cache(16)
    batch = TokenBatch.chain([1])
    with pytest.raises(ValueError, match="1 sequence"):
        engine.forward([(batch, cache), (batch, engine.new_cache(16))])
    other = load(tmp_path / "other", tiny_checkpoint(tiny_config("llama")))
    with pytest.raises(ContractError, match="caches stay"):
        other.forward([(batch, cache)])
    manifest = write_package(target, tiny_checkpoint(tiny_config("llama")), tmp_path / "threads", "float32")
    with pytest.raises(CapabilityError, match="threads"):
        BACKEND.load(tmp_path / "threads", manifest, manifest.artifacts[0], threads=2)
    engine.close()
    with pytest.raises(DeviceError, match="closed"):
        engine.forward([(batch, cache)])


@needs_mlx
def test_errors_of_mlx_come_out_as_device_errors(engine):
    import mlx.core as mx

    with pytest.raises(DeviceError) as caught, engine.device():
        mx.eval(mx.zeros((2, 3)) @ mx.zeros((2, 3)))
    assert isinstance(caught.value.__cause__, ValueError)


@needs_mlx
def test_positions_of_a_tree_within_a_window():
    from edgespec.backends.mlx_decoder import Positions

    length, window = 10, 4
    positions = Positions(TREE, length)
    start, mask = positions.visible(window)
    at = np.concatenate([np.arange(start, length), length + depths(TREE.parents)])
    for node in range(len(TREE)):
        path = path_to(TREE.parents, node)
        here = length + len(path) - 1
        sees = [j < length - start or (j - (length - start)) in path for j in range(len(at))]
        assert np.array(mask)[node].tolist() == [bool(s) and at[j] > here - window for j, s in enumerate(sees)]
    assert start == length + 1 - window  # what the row nearest to the context sees first


def test_without_mlx_the_backend_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    reason = BACKEND.why_not()
    assert reason is not None
    assert "pip install 'mlx[cpu]'" in reason or "pip install mlx" in reason
    assert BACKEND.describe() == reason
    with pytest.raises(CapabilityError, match="pip install"):
        BACKEND.load(tmp_path, None, None)  # refused before anything is looked at


def test_an_mlx_without_streams_for_any_thread_is_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", ModuleType("mlx.core"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.31.2")
    assert BACKEND.why_not() == "MLX 0.31.2 is too old; pip install 'mlx>=0.32'"


def test_importing_the_backend_loads_no_device_library():
    code = "import sys, edgespec.backends.mlx; sys.exit(any(n == 'mlx' or n.startswith('mlx.') for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=False).returncode == 0


@pytest.mark.metal
@needs_mlx
def test_metal_computes_in_the_files_type_and_agrees_with_the_reference(tmp_path):
    """Has never run: it was written on machines without Metal."""
    import mlx.core as mx

    if not mx.metal.is_available():
        pytest.skip("no Metal on this machine; this test has never run")
    for family in FAMILIES:
        checkpoint = tiny_checkpoint(tiny_config(family))
        ours, reference = load(tmp_path / family, checkpoint, "int8"), load(tmp_path / family, checkpoint, "int8", REFERENCE)
        assert ours.capabilities.unit == "gpu"
        assert ours.new_cache(16).host_bytes_copied == 0
        a, b = prefilled(ours, PROMPT), prefilled(reference, PROMPT)
        np.testing.assert_allclose(rows(ours, TREE, a), rows(reference, TREE, b), rtol=0, atol=0.5)  # 16-bit activations
