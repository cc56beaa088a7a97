"""From files to answers, for every family, source, recipe and engine, through the command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.core.decoder import FAMILIES, Family
from edgespec.core.engine import TokenBatch
from edgespec.orchestrator import store
from edgespec_converters.checkpoint import MemoryCheckpoint
from tests.e2e.conftest import RECIPES, Street
from tests.helpers.command import edgespec as edgespec_command
from tests.helpers.divergence import check_divergence
from tests.helpers.engines import ENGINES, make_reference
from tests.helpers.tiny import tiny_config, tiny_tensors, tiny_tokenizer, tiny_tokenizer_files, write_hf

ENGINE_NAMES = [case.name for case in ENGINES]
PROMPT = "def the return string: the string the return the"
JSON_KEYS = {"schema", "model", "draft", "text", "token_ids", "finish", "prompt_tokens", "stats"}
STATS_KEYS = {"rounds", "drafted", "kept", "tokens", "ttft_s", "tok_s", "overhead_share", "host_bytes_copied"}

STRINGS = [
    "", " ", "  two  spaces", "Hello, world!", "the return of the string", "def f(x):\n    return x", "naïve café", "ÅÄÖ åäö",
    "e\u0301 is two characters", "1234567890", "3.14159", "a1b2c3", "世界", "日本語テキスト", "한국어", "Привет, мир", "مرحبا",
    "👍🏽", "👩‍👩‍👧", "tab\tand\r\nnewline\n\n", "it's we'll they've", "snake_case CamelCase", "{'json': [1, 2, {\"a\": null}]}",
    "https://example.org/?q=1&r=2", "x != y && z <= w", "\u00a0no-break", "ﬁ ligature", "…—–", "\x00\x01", "systemuserassistant",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _at_home(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(street.home))


def skip_unless_it_works(engine: str) -> None:
    [case] = [case for case in ENGINES if case.name == engine]
    if reason := case.backend.why_not():
        pytest.skip(reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recipe_converts_and_the_printed_bits_are_those_on_disk(street: Street, family: Family) -> None:
    weights = sum(int(np.prod(shape)) for shape in street.configs[family].shapes().values())
    for recipe in RECIPES:
        result = street.conversions[family, recipe]
        assert result.code == 0, result.err
        package = store.find_package(family)
        for engine in ("onnx", "mlx"):
            [printed] = re.findall(rf"^  {engine} {recipe}: ([\d.]+) bits per weight", result.out, re.MULTILINE)
            folder = package.path / f"{engine}-{recipe}"
            tensors = sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".onnx", ".data"))
            assert float(printed) == pytest.approx(8 * tensors / weights, rel=0.01)
    assert [(a.engine, a.recipe) for a in package.manifest.artifacts] == [(e, r) for r in RECIPES for e in ("onnx", "mlx")]


@pytest.mark.parametrize("source", ["", "-gguf"], ids=["hf", "gguf"])
@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_round_trips_to_the_logits_of_the_reference(street: Street, family: Family, engine: str, source: str) -> None:
    skip_unless_it_works(engine)
    ids = list(range(3, 40, 2))
    written = MemoryCheckpoint(config=street.configs[family], tensors=street.tensors[family], tokenizer=tiny_tokenizer_files())
    reference = make_reference(written, street.home)
    with edgespec.load(f"{family}{source}", engine=engine, recipe="float32", draft="none") as runtime:
        found, expected = (e.forward([(TokenBatch.chain(ids), e.new_cache(64))])[0].logits for e in (runtime.target, reference))
        for i in range(len(ids)):
            np.testing.assert_allclose(found.row(i), expected.row(i), rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_draft_and_no_policy_changes_a_greedy_answer(street: Street, family: Family, engine: str, recipe: str) -> None:
    skip_unless_it_works(engine)
    common = ("generate", "--model", family, "--recipe", recipe, "--engine", engine, "--max-tokens", "14", "--json", PROMPT)
    plain = street.run(*common, "--draft", "none").line()
    assert plain["stats"]["drafted"] == 0
    drafted = 0
    for draft, policy in (("ngram", "fixed:4"), (f"{family}@int4", "window"), (f"{family}-gguf", "entropy"), ("ngram", "adaptive")):
        options = ("--draft-engine", "reference") if draft != "ngram" else ()
        answer = street.run(*common, "--draft", draft, "--policy", policy, *options).line()
        assert (answer["finish"], answer["prompt_tokens"]) == (plain["finish"], plain["prompt_tokens"])
        drafted += answer["stats"]["drafted"]
        if answer["token_ids"] != plain["token_ids"]:
            with edgespec.load(family, engine=engine, recipe=recipe, draft="none") as runtime:
                assert not runtime.target.capabilities.width_invariant
                ids = runtime.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
                check_divergence(runtime.target, ids, plain["token_ids"], answer["token_ids"], tolerance=1e-2)
    assert drafted > 0


@pytest.mark.parametrize(("temperature", "verify"), [("0", "greedy"), ("0.9", "rejection")])
@pytest.mark.parametrize(("engine", "recipe"), [("reference", "float32"), ("onnx", "int8")])
def test_a_draft_that_is_the_target_is_never_refused(street: Street, engine: str, recipe: str, temperature: str, verify: str) -> None:
    """Losslessness cannot see a broken drafter: this can. On engines whose rows do not depend on their neighbours."""
    model = ("--model", "qwen3", "--recipe", recipe, "--engine", engine, "--draft", f"qwen3@{recipe}", "--draft-engine", engine)
    drawn = ("--temperature", temperature, "--verify", verify, "--bias", "0=-100", "--bias", "2=-100")  # no stop before the end
    options = ("--policy", "fixed:4", "--max-tokens", "20", *drawn)
    stats = street.run("generate", *model, *options, "--json", PROMPT).line()["stats"]
    assert stats["kept"] == stats["drafted"] == 16
    assert (stats["rounds"], stats["tokens"]) == (4, 20)


def test_the_last_line_of_json_has_every_promised_key(street: Street) -> None:
    answer = street.run("generate", "--model", "llama", "--engine", "reference", "--max-tokens", "4", "--json", "hello").line()
    assert answer["schema"] == "edgespec.generate/1"
    assert answer.keys() >= JSON_KEYS
    assert answer["stats"].keys() >= STATS_KEYS
    assert answer["stats"]["tokens"] == len(answer["token_ids"]) <= 4


@pytest.mark.parametrize("source", ["llama", "llama-gguf"])
def test_esb_66_a_package_tokenises_as_its_source_does(street: Street, source: str) -> None:
    """The source's own tokenizer library against the package, on 30 strings; every special id is the row that it was trained on."""
    expected = tiny_tokenizer()
    with edgespec.load(source, engine="reference", recipe="float32", draft="none") as runtime:
        ours = runtime.tokenizer
        for text in STRINGS:
            assert ours.encode(text) == expected.encode(text, add_special_tokens=False).ids, text
        for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
            assert expected.token_to_id(token) in ours.control_ids
        assert set(ours.stop_ids) == {0, 2}
    assert len(STRINGS) == 30


def test_a_package_that_was_copied_elsewhere_is_whole_and_answers_the_same(street: Street, tmp_path: Path) -> None:
    here = street.run("generate", "--model", "qwen3", "--engine", "onnx", "--max-tokens", "6", "--json", "hello").line()
    shutil.copytree(street.home / "packages" / "qwen3", tmp_path / "moved" / "elsewhere")
    there = street.run(
        "generate", "--model", str(tmp_path / "moved" / "elsewhere"), "--engine", "onnx", "--max-tokens", "6", "--json", "hello"
    )
    assert there.line()["token_ids"] == here["token_ids"]


def test_a_piped_chat_remembers_and_saves_what_was_said(street: Street, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = f"the string\nreturn\n/stats\n/save {saved}\n".encode()
    result = street.run("chat", "--model", "qwen3", "--engine", "onnx", "--max-tokens", "5", stdin=lines)
    assert result.code == 0 and "2 answers" in result.err
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert result.out == "".join(f"{message['content']}\n" for message in messages[1::2])


def test_the_store_verifies_and_lists_what_was_converted(street: Street) -> None:
    listed = street.run("models", "--verify", "--json").line()
    assert listed["damaged"] == {}
    assert {package["name"] for package in listed["packages"]} == set(street.sources)


def test_padded_vocabularies_of_different_sizes_are_a_pair(street: Street, tmp_path: Path) -> None:
    """ESB-18 on real engines: the draft's embedding has other padding rows, the tokenizer is the same."""
    config = tiny_config("qwen2", vocab_rows=352, layers=1)
    assert config.vocab_rows != street.configs["qwen2"].vocab_rows
    source = write_hf(tmp_path / "small", config, tiny_tensors(config, 1))
    home = tmp_path / "home"
    assert edgespec_command("convert", str(source), "--recipe", "float32", "--targets", "mlx", home=home).code == 0
    draft = str(home / "packages" / "small")
    common = ("generate", "--model", "qwen2", "--engine", "reference", "--recipe", "int8", "--max-tokens", "8", "--json", PROMPT)
    plain = street.run(*common, "--draft", "none").line()
    paired = street.run(*common, "--draft", draft, "--draft-engine", "reference", "--policy", "fixed:3").line()
    assert paired["token_ids"] == plain["token_ids"]
    assert paired["draft"] == "small"
    assert paired["stats"]["drafted"] > 0
