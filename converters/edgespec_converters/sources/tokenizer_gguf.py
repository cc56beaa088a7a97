"""The tokenizer inside a GGUF file, rebuilt as a file that its own library runs.

"gpt2" is byte-level BPE (→ a `tokenizers` JSON); "llama" is sentencepiece BPE with scores (→ a sentencepiece model).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.core.errors import ArtifactError
from edgespec_converters.checkpoint import TokenizerFiles
from edgespec_converters.sources.stop_tokens import find_stop_ids

# tokenizer.ggml.token_type, the same numbers as sentencepiece's SentencePiece.Type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Words: a letter run or other run with one leading character, digits one at a time or in threes, line breaks, spaces.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (_CL100K.format(digits="{1,3}"),)
_QWEN2 = (_CL100K.format(digits=""),)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
# Each regular expression cuts what the ones before it left whole.
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
}
_NFC = frozenset({"qwen2"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})


def gguf_tokenizer(fields: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer in a GGUF file's metadata (plain Python values).

    Raises ArtifactError for a tokenizer that is missing, damaged, or of a kind that cannot be rebuilt exactly.
    """
    vocabulary = _Vocabulary(fields)
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        kind, content, add_bos = "tokenizers", _bpe(vocabulary, fields), fields.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    elif model == "llama":
        kind, content, add_bos = "sentencepiece", _sentencepiece(vocabulary, fields), True
    else:
        raise ArtifactError(f"GGUF tokenizer model {model!r} is not supported; supported are 'gpt2' (BPE) and 'llama' (sentencepiece)")
    return TokenizerFiles(
        kind=kind,
        content=content,
        vocab_size=len(vocabulary.tokens),
        add_bos=vocabulary.bos_id is not None and bool(fields.get("tokenizer.ggml.add_bos_token", add_bos)),
        bos_id=vocabulary.bos_id,
        stop_ids=vocabulary.stop_ids,
        chat_template=vocabulary.chat_template,
    )


class _Vocabulary:
    """The checked token list, without the padding that rounds up the embedding's rows."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        tokens: Sequence[Any] = _sequence(fields, "tokens")
        if bad := next((i for i, t in enumerate(tokens) if not isinstance(t, str)), None):
            raise ArtifactError(f"GGUF token {bad} is {type(tokens[bad]).__name__}, not text; the file is damaged, get it again")
        types: Sequence[Any] = _sequence(fields, "token_type") if _key("token_type") in fields else [NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise ArtifactError(f"GGUF has {len(tokens)} tokens but {len(types)} token types; the file is damaged, get it again")
        size = len(tokens)
        while size and types[size - 1] == UNUSED:
            size -= 1
        if not size:
            raise ArtifactError("GGUF has no tokens; the file holds no usable tokenizer, get another file")
        self.tokens: list[str] = list(tokens[:size])
        self.types: list[int] = [int(t) for t in types[:size]]
        self.ids = {text: i for i, text in enumerate(self.tokens) if self.types[i] != UNUSED}
        if len(self.ids) != sum(t != UNUSED for t in self.types):
            twice = next(t for i, t in enumerate(self.tokens) if self.types[i] != UNUSED and self.ids[t] != i)
            raise ArtifactError(f"GGUF holds token {twice!r} more than once; the file is damaged, get another one")
        self.bos_id = self._special(fields, "bos_token_id")
        template = fields.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) and template.strip() else None
        named = [self._special(fields, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
        bos_token, eos_token = ("" if i is None else self.tokens[i] for i in (self.bos_id, named[0]))
        self.stop_ids = find_stop_ids(
            named,
            added={text: i for text, i in self.ids.items() if self.types[i] in (CONTROL, USER_DEFINED)},
            control={i for i, kind in enumerate(self.types) if kind == CONTROL},
            chat_template=self.chat_template,
            bos_token=bos_token,
            eos_token=eos_token,
        )
        for i in (*self.stop_ids, *([] if self.bos_id is None else [self.bos_id])):
            self.types[i] = CONTROL  # some files leave them ordinary, and then user text could spell them

    def _special(self, fields: Mapping[str, Any], name: str) -> int | None:
        value = fields.get(_key(name))
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ArtifactError(f"GGUF {name} is {value!r}, outside its {len(self.tokens)} tokens; the file is damaged, get it again")
        return value


def _bpe(vocabulary: _Vocabulary, fields: Mapping[str, Any]) -> bytes:
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ArtifactError(f"GGUF pre-tokenizer {pre!r} is not known; splitting text wrongly ruins a model, so only {known} are read")
    added = [
        {"id": i, "content": text, "special": kind == CONTROL}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in PRE_TOKENIZERS[str(pre)]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if pre in _NFC else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre in _WHOLE_WORDS_FIRST,
                "vocab": vocabulary.ids,
                "merges": _merges(vocabulary, fields),
            },
        },
        ensure_ascii=False,
    ).encode()


def _merges(vocabulary: _Vocabulary, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for n, merge in enumerate(_sequence(fields, "merges")):
        # No token starts with the separator, but one may be a lone space.
        cut = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
        if not (left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids):
            raise ArtifactError(f"GGUF merge {n} ({merge!r:.80}) does not join two tokens into a third; the file is damaged, get it again")
        merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: _Vocabulary, fields: Mapping[str, Any]) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    scores: Sequence[Any] = _sequence(fields, "scores")
    if len(scores) < len(vocabulary.tokens) or not all(isinstance(s, int | float) for s in scores):
        raise ArtifactError(f"GGUF has {len(vocabulary.tokens)} tokens but {len(scores)} usable scores; the file is damaged, get it again")
    types = list(vocabulary.types)
    if UNKNOWN not in types:
        types[_unknown_id(vocabulary, fields)] = UNKNOWN
    pb: Any = sentencepiece_model_pb2
    model = pb.ModelProto()
    model.trainer_spec.model_type = 2  # BPE: pairs are joined in the order of their scores
    model.trainer_spec.vocab_size = len(types)
    model.trainer_spec.byte_fallback = BYTE in types
    model.trainer_spec.unk_id = types.index(UNKNOWN)
    model.trainer_spec.unk_piece = vocabulary.tokens[types.index(UNKNOWN)]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = bool(fields.get("tokenizer.ggml.remove_extra_whitespaces", False))
    model.normalizer_spec.escape_whitespaces = True
    for text, score, kind in zip(vocabulary.tokens, scores, types, strict=False):
        # GGUF writes user-defined pieces with plain spaces, sentencepiece looks for them in escaped text.
        model.pieces.add(piece=text.replace(" ", "▁") if kind == USER_DEFINED else text, score=score, type=kind)
    return model.SerializeToString()


def _unknown_id(vocabulary: _Vocabulary, fields: Mapping[str, Any]) -> int:
    """sentencepiece insists on one unknown piece, even if byte pieces leave nothing unknown."""
    value = fields.get("tokenizer.ggml.unknown_token_id", vocabulary.ids.get("<unk>"))
    if not isinstance(value, int) or not 0 <= value < len(vocabulary.tokens):
        raise ArtifactError(f"GGUF names no usable unknown token (found {value!r}); the file is damaged, get it again")
    return value


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _sequence(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = fields.get(_key(name))
    if not isinstance(value, list | tuple):
        raise ArtifactError(f"GGUF has no list {_key(name)!r}; the file holds no usable tokenizer, get another file")
    return value
