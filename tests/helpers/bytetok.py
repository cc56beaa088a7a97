"""Toy tokenizers that real libraries run: one token per byte plus named specials, and sentencepiece pieces with scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edgespec.orchestrator.text import Tokenizer
from edgespec_converters.checkpoint import TokenizerFiles
from edgespec_converters.sources.tokenizer_gguf import gguf_tokenizer

END, START = 256, 257  # ids of <|im_end|> and <|im_start|>
CONTROL = ("<|im_end|>", "<|im_start|>", "<|a|>", "|a|><|")  # the last two overlap
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Byte-level BPE's letter for each byte, by GPT-2's rule."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b if b in printable else next(other)) for b in range(256)]


def bytetok_fields(*, control: Sequence[str] = CONTROL, user_defined: Sequence[str] = ("<tool>",), **fields: Any) -> dict[str, Any]:
    """GGUF metadata of a BPE tokenizer whose id of byte b is b; then come control and user-defined tokens."""
    tokens = [*byte_alphabet(), *control, *user_defined]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(control) + [4] * len(user_defined),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": END,
    } | {f"tokenizer.{key}": value for key, value in fields.items()}


def spm_fields(*, add_space_prefix: bool = True, **fields: Any) -> dict[str, Any]:
    """GGUF metadata of a sentencepiece tokenizer: specials, the 256 bytes, then pieces whose score falls with the id."""
    pieces = ["▁", "a", "b", "c", "e", "t", "h", "▁a", "▁b", "▁c", "▁t", "he", "▁the", "é", "世", "👍"]
    user_defined = ["\n\n", "  ", "<tool>"]
    byte_pieces = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", "<turn_end>", *byte_pieces, *pieces, *user_defined]
    types = [2, 3, 3, 3] + [6] * 256 + [1] * len(pieces) + [4] * len(user_defined)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    } | {f"tokenizer.{key}": value for key, value in fields.items()}


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_content(**asdict(files))


def bytetok(template: str | None = CHATML, **options: Any) -> Tokenizer:
    return tokenizer_of(gguf_tokenizer(bytetok_fields(**options) | {"tokenizer.chat_template": template}))


def spmtok(**options: Any) -> Tokenizer:
    return tokenizer_of(gguf_tokenizer(spm_fields(**options)))


def edited(files: TokenizerFiles, **settings: Any) -> bytes:
    """A `tokenizers` JSON with some of its top-level settings replaced."""
    return json.dumps(json.loads(files.content) | settings).encode()
