"""Tiny random models of every family, written as a Hugging Face folder or as a GGUF file.

Weights are exact in bfloat16, so every unquantised writer is lossless. heads ≠ kv_heads ≠ layers, and a padded vocabulary, so
that a wrong count shows. The vocabulary (`VOCAB_SIZE`) is smaller than `vocab_rows`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edgespec.core.decoder import DecoderConfig, Family
from edgespec_converters.checkpoint import MemoryCheckpoint, TokenizerFiles

_FAMILY_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"layers": 3, "norm_eps": 1e-5},
    "qwen2": {"layers": 3, "attention_bias": True, "rope_theta": 1e6},
    "qwen3": {"layers": 3, "head_dim": 16, "qk_norm": True, "tied": True, "rope_theta": 1e6},
    "gemma3": {
        "layers": 7,
        "head_dim": 16,
        "qk_norm": True,
        "post_norms": True,
        "norm_offset": 1.0,
        "tied": True,
        "activation": "gelu_tanh",
        "rope_theta": 1e6,
        "rope_local_theta": 1e4,
        "sliding_window": 8,
    },
}


def tiny_config(family: Family, **overrides: Any) -> DecoderConfig:
    """8 heads on 2 kv heads; every row length a multiple of 32, so that block formats fit."""
    values: dict[str, Any] = {
        "family": family,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 96,
        "vocab_rows": 320,
        "max_context": 256,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    values |= _FAMILY_DEFAULTS[family] | overrides
    if family == "gemma3":  # five local layers, then one global
        values.setdefault("embed_scale", math.sqrt(values["hidden"]))
        values.setdefault("attention_scale", 1 / math.sqrt(values["head_dim"]))
        values.setdefault("sliding", tuple((i + 1) % 6 != 0 for i in range(values["layers"])))
    return DecoderConfig(**values)


def tiny_tensors(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by Hugging Face name. Norm weights are multiples of 1/64 about 1, so that gemma's ±1 is exact."""
    rng = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, shape in config.shapes().items():
        if name.endswith("norm.weight"):
            values = 1.0 - config.norm_offset + rng.integers(-16, 17, shape) / 64
        else:
            values = rng.standard_normal(shape) / math.sqrt(shape[-1])
        out[name] = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return out


# -- tokenizer: byte-level BPE with the pre-tokenizer of Qwen2 -----------------------------------------------------------

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = ("Ġthe", "Ġa", "def", "Ġreturn", "Ġstring", "ing", "ĠĠĠĠ", "system", "user", "assistant")


def _bpe() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, and merges: every byte, then the words above grown from the left."""
    tokens = [*CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        left = word[0]
        for right in word[1:]:
            if left + right not in tokens:
                tokens.append(left + right)
                merges.append((left, right))
            left += right
    return tokens, merges


VOCAB_SIZE = len(_bpe()[0])


def tiny_tokenizer() -> Tokenizer:
    tokens, merges = _bpe()
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL_TOKENS])
    return tokenizer


def tiny_tokenizer_files() -> TokenizerFiles:
    return TokenizerFiles(
        kind="tokenizers",
        content=tiny_tokenizer().to_str().encode(),
        vocab_size=VOCAB_SIZE,
        add_bos=False,
        bos_id=None,
        stop_ids=(0, EOS_ID),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_checkpoint(config: DecoderConfig, seed: int = 0) -> MemoryCheckpoint:
    return MemoryCheckpoint(
        config=config, tensors=tiny_tensors(config, seed), tokenizer=tiny_tokenizer_files(), name=f"tiny-{config.family}"
    )


# -- Hugging Face folder -------------------------------------------------------------------------------------------------

_CLASSES: dict[Family, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """config.json as `transformers` writes it."""
    model_type, architecture = _CLASSES[config.family]
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab_rows,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _hf_rope(config),
        "tie_word_embeddings": config.tied,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
    }
    if config.family != "qwen2":
        out["head_dim"] = config.head_dim
    if config.family == "gemma3":
        out |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(config.scale**-2),
            "sliding_window": config.sliding_window,
            "rope_local_base_freq": config.rope_local_theta,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in config.sliding],
        }
    else:
        out["hidden_act"] = "silu"
    return out


def _hf_rope(config: DecoderConfig) -> dict[str, Any] | None:
    s = config.rope_scaling
    if s is None:
        return None
    out: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind != "linear":
        out["original_max_position_embeddings"] = s.original_context
    if s.kind == "llama3":
        out |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        out |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
    return out


_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def write_hf(
    folder: Path,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "F32",
    shards: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A complete folder: weights, config, generation config, tokenizer. `settings` overrides config.json; None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = hf_config(config) | dict(settings or {})
    _write_json(folder / "config.json", {k: v for k, v in merged.items() if v is not None})
    stored = {name: np.ascontiguousarray(t.astype(_DTYPES[dtype])) for name, t in tensors.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = list(stored)
        weight_map: dict[str, str] = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: stored[n] for n in names[i::shards]}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names[i::shards], file)
        total = sum(t.nbytes for t in stored.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_hf_tokenizer(folder)
    return folder


def write_hf_tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS_ID, 0]})


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


# -- GGUF ----------------------------------------------------------------------------------------------------------------

_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}


def gguf_name(config: DecoderConfig, name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    norms = (
        {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
        if config.post_norms
        else {"post_attention_layernorm": "ffn_norm"}
    )
    return f"blk.{layer}.{(_GGUF_LAYER | norms)[part]}.{kind}"


def to_gguf_values(config: DecoderConfig, name: str, values: np.ndarray) -> np.ndarray:
    """What llama.cpp's converter does to a tensor: pairs instead of halves for llama's q and k, gemma's norms plus one."""
    if config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.heads if ".q_proj." in name else config.kv_heads
        return values.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
    if config.family == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def write_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    kind: str = "F32",
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """`kind`: GGML type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1); vectors stay F32.

    `settings` adds or overrides hyperparameters by key without the architecture, `extra` adds tensors by GGUF name, as the
    file's own bytes and their GGML type.
    """
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_name(f"tiny {config.family}")
    writer.add_license("apache-2.0")
    for key, value in (gguf_settings(config) | dict(settings or {})).items():
        _add(writer, f"{config.family}.{key}", value)
    _add_tokenizer(writer, config.vocab_rows)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        values = np.ascontiguousarray(to_gguf_values(config, name, values), np.float32)
        if values.ndim == 2:
            data = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(gguf_name(config, name), data, raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(config, name), values)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(config))
    for name, (data, data_kind) in (extra or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[data_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_settings(config: DecoderConfig) -> dict[str, Any]:
    """Hyperparameters by key without the architecture, as llama.cpp's converter writes them."""
    out: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if config.head_dim * config.heads != config.hidden:
        out |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.sliding_window:
        out["attention.sliding_window"] = config.sliding_window
    s = config.rope_scaling
    if s is not None and s.kind != "llama3":
        out |= {"rope.scaling.type": s.kind, "rope.scaling.factor": s.factor}
        if s.kind == "yarn":
            out |= {
                "rope.scaling.original_context_length": s.original_context,
                "rope.scaling.yarn_beta_fast": s.beta_fast,
                "rope.scaling.yarn_beta_slow": s.beta_slow,
            }
    return out


def _rope_factors(config: DecoderConfig) -> np.ndarray:
    """llama.cpp stores Llama 3's scaling as what each frequency is divided by."""
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / config.rope(0)[0]).astype(np.float32)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_rows: int) -> None:
    """llama.cpp's converter names padding rows and marks them unused."""
    tokens, merges = _bpe()
    types = [gguf.TokenType.CONTROL if t in CONTROL_TOKENS else gguf.TokenType.NORMAL for t in tokens]
    padding = range(len(tokens), vocab_rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
