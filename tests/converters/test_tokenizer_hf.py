from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.errors import ArtifactError
from edgespec_converters.sources.tokenizer_gguf import gguf_tokenizer
from edgespec_converters.sources.tokenizer_hf import hf_tokenizer
from tests.helpers.bytetok import CHATML, END, START, bytetok_fields, edited, spm_fields, tokenizer_of

BPE = gguf_tokenizer(bytetok_fields())
SPM = gguf_tokenizer(spm_fields())


def folder_of(path: Path, *, content: bytes = BPE.content, name: str = "tokenizer.json", **configs: Any) -> Path:
    (path / name).write_bytes(content)
    for config, data in configs.items():
        text = data if isinstance(data, str) else json.dumps(data)
        (path / f"{config}.json").write_text(text, encoding="utf-8")
    return path


def test_tokenizer_json_is_kept_as_it_is(tmp_path: Path) -> None:
    files = hf_tokenizer(folder_of(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": CHATML}))
    assert files.content == BPE.content
    assert (files.kind, files.vocab_size, files.stop_ids, files.chat_template) == ("tokenizers", BPE.vocab_size, (END,), CHATML)
    assert tokenizer_of(files).digest() == tokenizer_of(BPE).digest()


@pytest.mark.parametrize("token", ["<|im_start|>", {"content": "<|im_start|>", "lstrip": False}])
def test_special_tokens_as_text_or_object(tmp_path: Path, token: object) -> None:
    files = hf_tokenizer(folder_of(tmp_path, tokenizer_config={"bos_token": token, "eos_token": "<|im_end|>", "add_bos_token": True}))
    assert (files.bos_id, files.add_bos, files.stop_ids) == (START, True, (END,))


def test_a_post_processor_that_adds_bos_says_so(tmp_path: Path) -> None:
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [bos, sequence],
        "pair": [bos, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [START], "tokens": ["<|im_start|>"]}},
    }
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = folder_of(tmp_path, content=edited(BPE, post_processor=processor), tokenizer_config=config)
    assert hf_tokenizer(folder).add_bos
    folder_of(tmp_path, tokenizer_config=config)
    assert not hf_tokenizer(folder).add_bos


@pytest.mark.parametrize("eos", [258, [258], [258, END]])
def test_esb_23_every_source_of_stop_ids_counts(tmp_path: Path, eos: object) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": eos},
        config={"eos_token_id": 259},
    )
    assert hf_tokenizer(folder).stop_ids == (END, 258, 259)


def test_esb_23_the_token_that_ends_turns_is_a_stop_and_special(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n<tool>\n{% endfor %}"
    folder = folder_of(
        tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": template}, generation_config={"eos_token_id": [END]}
    )
    files = hf_tokenizer(folder)
    tool = BPE.vocab_size - 1
    tokenizer = tokenizer_of(files)
    assert files.stop_ids == (END, tool)
    assert tokenizer.decode([97, tool, END, 98]) == "ab"
    assert tool not in tokenizer.encode("a<tool>b")
    assert tokenizer.encode_chat([{"role": "user", "content": "<tool>"}]).count(tool) == 1


def test_templates_by_name_and_in_their_own_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = folder_of(tmp_path, tokenizer_config={"chat_template": named})
    assert hf_tokenizer(folder).chat_template == "D"
    folder_of(tmp_path, tokenizer_config={"chat_template": named[:1]})
    assert hf_tokenizer(folder).chat_template == "T"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert hf_tokenizer(folder).chat_template == "F"


def test_added_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}, config={"vocab_size": BPE.vocab_size - 1})
    files = hf_tokenizer(folder)
    assert files.vocab_size == BPE.vocab_size - 1
    assert tokenizer_of(files).encode("<tool>") == list(b"<tool>")


def test_a_sentencepiece_model_gets_the_tokens_of_its_configuration(tmp_path: Path) -> None:
    added = {
        "3": {"content": "<turn_end>", "special": True},
        str(SPM.vocab_size - 1): {"content": "<tool>", "special": True},
        str(SPM.vocab_size): {"content": "<|im_start|>", "special": True},
        str(SPM.vocab_size + 1): {"content": "<think>", "special": False},
    }
    config = {"added_tokens_decoder": added, "bos_token": "<s>", "eos_token": "</s>"}
    files = hf_tokenizer(folder_of(tmp_path, content=SPM.content, name="tokenizer.model", tokenizer_config=config))
    tokenizer = tokenizer_of(files)
    assert (files.kind, files.vocab_size, files.add_bos, files.bos_id, files.stop_ids) == (
        "sentencepiece",
        SPM.vocab_size + 2,
        True,
        1,
        (2,),
    )
    assert {SPM.vocab_size - 1, SPM.vocab_size} <= tokenizer.control_ids
    ids = tokenizer.encode("a<think><tool><|im_start|>")
    assert SPM.vocab_size + 1 in ids
    assert not tokenizer.control_ids.intersection(ids)


def test_an_unchanged_sentencepiece_model_is_kept_as_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, content=SPM.content, name="tokenizer.model", tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    assert hf_tokenizer(folder).content == SPM.content


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ({"tokenizer_config": {"auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}}}, "never run"),
        ({"tokenizer_config": "{"}, "not JSON"),
        ({"tokenizer_config": "[" * 100_000}, "not JSON"),
        ({"tokenizer_config": "[]"}, "instead of an object"),
        ({"generation_config": {"eos_token_id": 10**6}}, "eos_token_id is 1000000"),
        ({"config": {"eos_token_id": "2"}}, "eos_token_id is '2'"),
        ({"config": {"bos_token_id": True}}, "bos_token_id is True"),
        ({"config": {"vocab_size": 3}}, "256 tokens but config.json says 3"),
    ],
)
def test_damaged_or_hostile_folders_are_clear_errors(tmp_path: Path, configs: dict[str, Any], says: str) -> None:
    (tmp_path / "tokenization_evil.py").write_text("open('executed', 'w')", encoding="utf-8")
    with pytest.raises(ArtifactError, match=says) as caught:
        hf_tokenizer(folder_of(tmp_path, **configs))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_a_damaged_or_missing_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        hf_tokenizer(tmp_path)
    with pytest.raises(ArtifactError, match="sentencepiece model"):
        hf_tokenizer(folder_of(tmp_path, content=b"\xff" * 40, name="tokenizer.model"))
    with pytest.raises(ArtifactError, match="damaged"):
        hf_tokenizer(folder_of(tmp_path, content=b"\x80\x04pickle"))


def test_added_tokens_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"5000": {"content": "<x>", "special": True}}}
    with pytest.raises(ArtifactError, match="'<x>' has id 5000"):
        hf_tokenizer(folder_of(tmp_path, content=SPM.content, name="tokenizer.model", tokenizer_config=config))
