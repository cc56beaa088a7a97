from __future__ import annotations

from typing import Any

import pytest

from edgespec.core.errors import ArtifactError
from edgespec_converters.sources.tokenizer_gguf import PRE_TOKENIZERS, gguf_tokenizer
from tests.helpers.bytetok import CHATML, END, START, bytetok_fields, spm_fields, tokenizer_of


def test_trailing_padding_is_not_part_of_the_vocabulary() -> None:
    fields = bytetok_fields()
    padded = fields | {
        "tokenizer.ggml.tokens": [*fields["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"],
        "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], 5, 5],
    }
    plain, files = gguf_tokenizer(fields), gguf_tokenizer(padded)
    assert files.vocab_size == plain.vocab_size == len(fields["tokenizer.ggml.tokens"])
    assert tokenizer_of(files).digest() == tokenizer_of(plain).digest()


def test_an_unused_id_between_others_keeps_its_place_and_has_no_bytes() -> None:
    fields = bytetok_fields(control=("<|im_end|>", "[UNUSED]", "<|im_start|>"))
    types = list(fields["tokenizer.ggml.token_type"])
    types[257] = 5
    tokenizer = tokenizer_of(gguf_tokenizer(fields | {"tokenizer.ggml.token_type": types}))
    assert tokenizer.token_bytes(257) == b""
    assert tokenizer.token_bytes(258) == b"<|im_start|>"


def test_bos_follows_the_file_and_each_kinds_habit() -> None:
    assert gguf_tokenizer(spm_fields()).add_bos
    assert not gguf_tokenizer(spm_fields(**{"ggml.add_bos_token": False})).add_bos
    assert not gguf_tokenizer(bytetok_fields(**{"ggml.bos_token_id": START})).add_bos
    assert gguf_tokenizer(bytetok_fields(**{"ggml.bos_token_id": START, "ggml.add_bos_token": True})).add_bos
    assert gguf_tokenizer(bytetok_fields(**{"ggml.bos_token_id": START, "ggml.pre": "llama-bpe"})).add_bos
    assert not gguf_tokenizer(bytetok_fields(**{"ggml.add_bos_token": True})).add_bos  # without an id there is nothing to add


def test_stop_ids_are_the_union_of_all_ends() -> None:
    control = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<other>", "<|eot_id|>")
    fields = bytetok_fields(control=control, **{"ggml.eos_token_id": 258, "ggml.eot_token_id": 259, "chat_template": CHATML})
    files = gguf_tokenizer(fields)
    assert files.stop_ids[0] == 258
    assert set(files.stop_ids) == {256, 258, 259, 260}
    assert files.chat_template == CHATML


def test_a_turn_end_that_the_file_calls_user_defined_becomes_control() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} <tool>\n{% endfor %}"
    tokenizer = tokenizer_of(gguf_tokenizer(bytetok_fields(chat_template=template)))
    tool = tokenizer.vocab_size - 1
    assert tool in tokenizer.stop_ids
    assert tool not in tokenizer.encode("a <tool>")
    spm = tokenizer_of(gguf_tokenizer(spm_fields(chat_template=template)))
    tool = spm.vocab_size - 1
    assert tool in spm.stop_ids
    assert tool not in spm.encode("a <tool>")


def test_nfc_is_part_of_qwen2_alone() -> None:
    for pre in PRE_TOKENIZERS:
        ids = tokenizer_of(gguf_tokenizer(bytetok_fields(**{"ggml.pre": pre}))).encode("e\u0301")
        assert bytes(ids) == ("é" if pre == "qwen2" else "e\u0301").encode(), pre


def test_whole_words_come_first_in_llama3() -> None:
    fields = bytetok_fields(control=("<|im_end|>",))
    fields["tokenizer.ggml.tokens"].append("abc")  # a word that no merge makes
    fields["tokenizer.ggml.token_type"].append(1)
    word = len(fields["tokenizer.ggml.tokens"]) - 1
    for pre, ids in (("llama-bpe", [word]), ("qwen2", [97, 98, 99])):
        assert tokenizer_of(gguf_tokenizer(fields | {"tokenizer.ggml.pre": pre})).encode("abc") == ids


def test_esb_66_an_unknown_pre_tokenizer_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ArtifactError, match=r"'mystery' is not known.*llama-bpe.*qwen2.*smollm"):
        gguf_tokenizer(bytetok_fields(**{"ggml.pre": "mystery"}))


TOKENS = bytetok_fields()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"model": None}, "None is not supported"),
        ({"tokens": None}, "no list 'tokenizer.ggml.tokens'"),
        ({"tokens": []}, "0 tokens but 261 token types"),
        ({"tokens": [], "token_type": []}, "no tokens"),
        ({"tokens": [*TOKENS[:-1], 7]}, "token 260 is int, not text"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "token 'a' more than once"),
        ({"token_type": [1]}, "261 tokens but 1 token types"),
        ({"merges": None}, "no list 'tokenizer.ggml.merges'"),
        ({"merges": ["a b"]}, "merge 0 .* does not join"),
        ({"merges": ["ab"]}, "merge 0 .* does not join"),
        ({"merges": [3]}, "merge 0 .* does not join"),
        ({"eos_token_id": 261}, "eos_token_id is 261"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
    ],
)
def test_damaged_bpe_metadata_is_a_clear_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ArtifactError, match=says) as caught:
        gguf_tokenizer(bytetok_fields() | {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scores": None}, "no list 'tokenizer.ggml.scores'"),
        ({"scores": [0.0]}, "279 tokens but 1 usable scores"),
        ({"scores": ["x"] * 279}, "usable scores"),
        ({"token_type": [3] * 279, "unknown_token_id": 300}, "unknown token"),
    ],
)
def test_damaged_sentencepiece_metadata_is_a_clear_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        gguf_tokenizer(spm_fields() | {f"tokenizer.ggml.{key}": value for key, value in fields.items()})


def test_end_id_is_eos() -> None:
    assert gguf_tokenizer(bytetok_fields()).stop_ids == (END,)
