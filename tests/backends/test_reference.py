import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.backends.reference import BACKEND, ReferenceEngine
from edgespec.core.decoder import FAMILIES, RopeScaling
from edgespec.core.draft import path_to
from edgespec.core.engine import TokenBatch
from edgespec.core.errors import ArtifactError, ContractError
from edgespec.core.manifest import Artifact, Manifest, TokenizerSpec
from edgespec_converters.quantize import quantize
from tests.helpers.tiny import VOCAB_SIZE, tiny_config, tiny_tensors

TOKENS = [5, 9, 2, 7, 7, 1, 30, 12, 4, 3, 21, 60, 8, 8, 17]


def engine_of(config, tensors=None):
    tensors = tiny_tensors(config) if tensors is None else tensors
    return ReferenceEngine(config, tensors, name="tiny", vocab_size=VOCAB_SIZE, vocab_digest="d")


def textbook(config, tensors, tokens):
    """float64 [V]: the whole prefix at once, one head and one position at a time, complex numbers for the rotation."""
    t = {name: values.astype(np.float64) for name, values in tensors.items()}

    def rms(x, w):
        return x / math.sqrt(float(np.mean(x * x)) + config.norm_eps) * (w + config.norm_offset)

    def turn(x, position, layer):
        frequencies, factor = config.rope(layer)
        half = config.head_dim // 2
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies) * factor
        return np.concatenate([z.real, z.imag])

    xs = [t["model.embed_tokens.weight"][token] * config.embed_scale for token in tokens]
    for i in range(config.layers):
        p = f"model.layers.{i}."
        heads = {"q": [], "k": [], "v": []}
        for position, x in enumerate(xs):
            h = rms(x, t[p + "input_layernorm.weight"])
            for which, out in heads.items():
                y = t[f"{p}self_attn.{which}_proj.weight"] @ h
                if config.attention_bias:
                    y = y + t[f"{p}self_attn.{which}_proj.bias"]
                y = list(y.reshape(-1, config.head_dim))
                if config.qk_norm and which != "v":
                    y = [rms(z, t[f"{p}self_attn.{which}_norm.weight"]) for z in y]
                out.append(y if which == "v" else [turn(z, position, i) for z in y])
        for position in range(len(xs)):
            first = 0 if config.window(i) is None else max(0, position - config.window(i) + 1)
            mixed = []
            for head in range(config.heads):
                kv = head * config.kv_heads // config.heads
                scores = [heads["q"][position][head] @ heads["k"][j][kv] * config.scale for j in range(first, position + 1)]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                mixed.append(sum(w * heads["v"][first + j][kv] for j, w in enumerate(weights)))
            out = t[p + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
            if config.post_norms:
                xs[position] = xs[position] + rms(out, t[p + "post_attention_layernorm.weight"])
                h = rms(xs[position], t[p + "pre_feedforward_layernorm.weight"])
            else:
                xs[position] = xs[position] + out
                h = rms(xs[position], t[p + "post_attention_layernorm.weight"])
            gate, up = t[p + "mlp.gate_proj.weight"] @ h, t[p + "mlp.up_proj.weight"] @ h
            if config.activation == "silu":
                gate = gate / (1 + np.exp(-gate))
            else:
                gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            out = t[p + "mlp.down_proj.weight"] @ (gate * up)
            xs[position] = xs[position] + (rms(out, t[p + "post_feedforward_layernorm.weight"]) if config.post_norms else out)
    head = t["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return head[:VOCAB_SIZE] @ rms(xs[-1], t["model.norm.weight"])


SCALINGS = [
    RopeScaling(kind="linear", factor=2.0),
    RopeScaling(kind="llama3", factor=8.0, original_context=32),
    RopeScaling(kind="yarn", factor=4.0, original_context=32),
]


@pytest.mark.parametrize(
    "config",
    [tiny_config(family) for family in FAMILIES] + [tiny_config("llama", rope_scaling=s, tied=True) for s in SCALINGS],
    ids=[*FAMILIES, *(s.kind for s in SCALINGS)],
)
def test_logits_are_the_textbooks(config):
    tensors = tiny_tensors(config)
    engine = engine_of(config, tensors)
    logits = engine.forward([(TokenBatch.chain(TOKENS), engine.new_cache(32))])[0].logits
    for n in (1, 9, len(TOKENS)):
        np.testing.assert_allclose(logits.row(n - 1), textbook(config, tensors, TOKENS[:n]), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_and_chunks_change_no_bit(family):
    """Real widths (576 and 1536 columns) reach other code in the linear algebra library than the tiny ones."""
    rng = np.random.default_rng(1)
    sliding = (True, False) if family == "gemma3" else ()
    config = tiny_config(family, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, layers=2, sliding=sliding)
    engine = engine_of(config)
    prompt = rng.integers(0, VOCAB_SIZE, 21).tolist()
    cache = engine.new_cache(64)
    engine.forward([(TokenBatch.chain(prompt, scored=0), cache)])
    cache.commit(range(len(prompt)))
    chain_cache = engine.new_cache(64)
    for n in (1, 3, 8, 16):
        batch = TokenBatch(
            rng.integers(0, VOCAB_SIZE, n).astype(np.int32), np.array([rng.integers(max(-1, i - 4), i) for i in range(n)], np.int32)
        )
        scores = engine.forward([(batch, cache)], features=True)[0]
        node = n - 1
        tokens = prompt + batch.token_ids[path_to(batch.parents, node)].tolist()
        chain_cache.truncate(0)
        for start in range(0, len(tokens), n):
            part = tokens[start : start + n]
            alone = engine.forward([(TokenBatch.chain(part, scored=1), chain_cache)], features=True)[0]
            chain_cache.commit(range(len(part)))
        np.testing.assert_array_equal(scores.logits.row(node), alone.logits.row(0))
        np.testing.assert_array_equal(scores.features[node], alone.features[-1])


def test_cancel_is_looked_at_between_layers():
    config = tiny_config("llama")
    engine = engine_of(config)
    looks = []

    class Token:
        def check(self):
            looks.append(None)

    engine.forward([(TokenBatch.chain([1]), engine.new_cache(4))], cancel=Token())
    assert len(looks) == config.layers


def test_missing_and_misshapen_tensors_are_named():
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:, :32]
    with pytest.raises(ArtifactError, match=r"model.layers.1.mlp.up_proj.weight should have shape \(96, 64\), found \(96, 32\)"):
        engine_of(config, tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ArtifactError, match="found None"):
        engine_of(config, tensors)


def test_another_engines_cache_is_refused():
    engine = engine_of(tiny_config("llama"))

    class Foreign:
        length, capacity = 0, 8

    with pytest.raises(ContractError, match="Foreign"):
        engine.forward([(TokenBatch.chain([1]), Foreign())])


# -- artifacts -----------------------------------------------------------------------------------------------------------


def packed(codes, bits):
    """uint32 words, lowest bits first, as MLX packs them."""
    per = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per), np.uint32)
    for i in range(per):
        words |= codes[:, i::per].astype(np.uint32) << np.uint32(i * bits)
    return words


def write_artifact(folder, config, tensors, *, bits=4, group=32):
    """Matrices in `bits`, except the embedding in 8 and one matrix left in half precision. Returns the float32 values meant."""
    folder.mkdir()
    stored, meant = {}, {}
    settings: dict = {"group_size": group, "bits": bits}
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        if values.ndim == 1 or stem.endswith("layers.0.mlp.down_proj"):
            stored[name] = values.astype(np.float16)
            meant[name] = stored[name].astype(np.float32)
            continue
        width = 8 if "embed" in name else bits
        if width != bits:
            settings[stem] = {"group_size": group, "bits": width}
        q = quantize(values, bits=width, block=group, symmetric=False)
        stored |= {name: packed(q.codes, width), f"{stem}.scales": q.scales, f"{stem}.biases": q.biases()}
        meant[name] = q.dequantize()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization": settings}))
    return meant


def manifest_of(config):
    return Manifest(
        name="tiny",
        decoder=config,
        vocab_size=VOCAB_SIZE,
        vocab_digest="d",
        tokenizer=TokenizerSpec(kind="tokenizers", file="tokenizer.json", add_bos=False, bos_id=None, stop_ids=(2,)),
        files={},
    )


ARTIFACT = Artifact(engine="mlx", recipe="int4", folder="mlx-int4", files={}, weight_bytes=1234, bits_per_weight=4.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_artifacts_load_as_what_was_packed(tmp_path, family):
    config = tiny_config(family)
    meant = write_artifact(tmp_path / "mlx-int4", config, tiny_tensors(config))
    engine = BACKEND.load(tmp_path, manifest_of(config), ARTIFACT)
    assert engine.spec.weight_bytes == 1234
    expected = engine_of(config, meant)
    batch = TokenBatch.chain(TOKENS)
    loaded_rows = engine.forward([(batch, engine.new_cache(32))])[0].logits
    meant_rows = expected.forward([(batch, expected.new_cache(32))])[0].logits
    for i in range(len(TOKENS)):
        np.testing.assert_allclose(loaded_rows.row(i), meant_rows.row(i), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_agrees_with_mlx(tmp_path, bits):
    mx = pytest.importorskip("mlx.core")
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    name = "model.layers.0.mlp.up_proj"
    words, scales, biases = (np.array(a) for a in mx.quantize(mx.array(tensors[f"{name}.weight"]), group_size=32, bits=bits))
    stored = {n: v for n, v in tensors.items() if n != f"{name}.weight"}
    stored |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
    folder = tmp_path / "mlx-int4"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization": {"group_size": 32, "bits": bits}}))
    whole = np.array(mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=32, bits=bits))
    expected = engine_of(config, tensors | {f"{name}.weight": whole})
    engine = BACKEND.load(tmp_path, manifest_of(config), ARTIFACT)
    batch = TokenBatch.chain(TOKENS)
    np.testing.assert_allclose(
        engine.forward([(batch, engine.new_cache(32))])[0].logits.row(14),
        expected.forward([(batch, expected.new_cache(32))])[0].logits.row(14),
        atol=1e-6,
    )


def damage_truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_config(folder):
    (folder / "config.json").write_text('{"quantization": {"group_size": 32}}')


def damage_remove(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_config, damage_remove])
def test_damaged_artifacts_are_refused(tmp_path, damage):
    config = tiny_config("llama")
    write_artifact(tmp_path / "mlx-int4", config, tiny_tensors(config))
    damage(tmp_path / "mlx-int4")
    with pytest.raises(ArtifactError, match="convert the model again"):
        BACKEND.load(tmp_path, manifest_of(config), ARTIFACT)
