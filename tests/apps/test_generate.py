from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers import fake_runtime


def the_line(result) -> dict:  # type: ignore[no-untyped-def]
    lines = result.out.splitlines()
    assert len(lines) == 1, "with --json stdout is one line"
    return json.loads(lines[0])


def test_text_goes_to_stdout_and_nothing_else(command):
    result = command("generate", "--model", "m", "hello")
    assert (result.code, result.out) == (0, "You said: hello. You said: hello.\n")
    assert "error" not in result.err


def test_json_has_the_promised_keys(command):
    answer = the_line(command("generate", "--model", "m", "--draft", "ngram", "--policy", "fixed:4", "--json", "hello hello"))
    assert answer["schema"] == "edgespec.generate/1"
    assert (answer["model"], answer["draft"], answer["engine"]) == ("m", "ngram", "toy")
    assert answer["text"] == "You said: hello hello. You said: hello hello."
    assert bytes(answer["token_ids"][:-1]).decode() == answer["text"]
    assert answer["finish"] == "stop"
    assert answer["prompt_tokens"] == len("hello hello") + 2
    stats = answer["stats"]
    assert stats.keys() >= {"rounds", "drafted", "kept", "tokens", "ttft_s", "tok_s", "overhead_share", "host_bytes_copied"}
    assert stats["tokens"] == len(answer["token_ids"])
    assert 0 < stats["kept"] <= stats["drafted"]
    assert stats["rounds"] == len(answer["trace"]) < stats["tokens"]


def test_speculation_changes_rounds_but_not_tokens(command):
    plain = the_line(command("generate", "--draft", "none", "--json", "abcabcabc"))
    guessed = the_line(command("generate", "--draft", "ngram", "--policy", "fixed:4", "--json", "abcabcabc"))
    assert plain["token_ids"] == guessed["token_ids"]
    assert plain["stats"]["drafted"] == 0
    assert guessed["stats"]["rounds"] < plain["stats"]["rounds"]


def test_max_tokens_ends_with_length(command):
    answer = the_line(command("generate", "--json", "--max-tokens", "3", "hello"))
    assert (answer["text"], answer["finish"], len(answer["token_ids"])) == ("You", "length", 3)


def test_stop_raw_system_and_logprobs_reach_the_session(command):
    assert command("generate", "--stop", " said", "hello").out == "You\n"
    assert command("generate", "--raw", "--max-tokens", "6", "hello").out == "wrawra\n"
    assert command("generate", "--system", "Sys", "hello").out == "Sys: hello.\n"
    scored = the_line(command("generate", "--json", "--logprobs", "2", "hi"))["logprobs"]
    assert [len(token["top"]) for token in scored] == [2] * len(scored)


def test_load_gets_the_options(command):
    command("generate", "-m", "big", "--draft", "none", "--engine", "reference", "--recipe", "int4", "--threads", "2", "x")
    assert fake_runtime.loads == [
        {
            "model": "big",
            "engine": "reference",
            "recipe": "int4",
            "draft": "none",
            "draft_engine": "auto",
            "threads": 2,
            "profile": None,
            "require_unit": None,
        }
    ]


def test_sampling_options_reach_the_law(command):
    biased = command("generate", "--bias", f"{ord('X')}=100", "--max-tokens", "3", "hi")
    assert biased.out == "XXX\n"


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_prompt_from_standard_input_loses_its_last_newline(command, arguments):
    assert command("generate", *arguments, stdin="héllo\n".encode()).out == "You said: héllo. You said: héllo.\n"


def test_prompt_from_a_file(command, tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8-sig")
    assert command("generate", "--file", str(file)).out.startswith("You said: from a file. ")


def test_trace_file_has_a_line_per_round(command, tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    answer = the_line(command("generate", "--json", "--trace", str(file), "hello"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == answer["trace"]
    assert [line["round"] for line in lines] == list(range(answer["stats"]["rounds"]))


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (["--temperature", "-1", "x"], b"", "temperature must be >= 0"),
        (["--temperature", "warm", "x"], b"", "--temperature"),
        (["--top-p", "0", "x"], b"", "top_p"),
        (["--policy", "fixed:x", "x"], b"", "fixed:x"),
        (["--policy", "fixed:-1", "x"], b"", "fixed:-1"),
        (["--engine", "cuda", "x"], b"", "cuda"),
        (["--verify", "greedy", "--temperature", "1", "x"], b"", "greedy"),
        (["--max-tokens", "0", "x"], b"", "max-tokens"),
        (["--max-tokens", "-4", "x"], b"", "max-tokens"),
        (["--max-context", "100000", "x"], b"", "max_context"),
        (["--bias", "word=1", "x"], b"", "--bias needs ID=VALUE"),
        (["--bias", "12", "x"], b"", "--bias needs ID=VALUE"),
        (["--bias", "1=inf", "x"], b"", "at most 1e+30"),
        (["--logprobs", "3", "x"], b"", "--json"),
        (["--stop", "", "x"], b"", "--stop"),
        (["--raw", "--system", "s", "x"], b"", "--system"),
        (["--file", "/no/such/file"], b"", "/no/such/file"),
        (["--file", "a", "x"], b"", "not both"),
        ([""], b"", "empty"),
        ([], b"\n", "empty"),
        ([], b"caf\xe9", "not UTF-8"),
        (["bad \udce9"], b"", "not UTF-8"),
        (["raise"], b"", "the template refuses this"),
        (["--no-such-option", "x"], b"", "--no-such-option"),
        (["hello", "world"], b"", 'in quotes: edgespec generate "hello world"'),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(command, arguments, stdin, says):
    result = command("generate", *arguments, stdin=stdin)
    assert result.code == 2
    assert result.out == ""
    [line] = result.err.splitlines()
    assert line.startswith("edgespec: error: ") and says in line


def test_a_missing_model_is_one_line_and_code_1(command):
    result = command("generate", "--model", "absent", "x")
    assert (result.code, result.out) == (1, "")
    assert result.err == "edgespec: error: no model 'absent' in the store (installed: none); run `edgespec pull absent`\n"


def test_a_prompt_too_long_for_the_context_is_code_1(command):
    result = command("generate", "x" * 700)
    assert result.code == 1
    assert "the prompt has 702 tokens and the context holds 600; shorten it, as this model allows no more\n" in result.err
    assert len(result.err.splitlines()) == 1
    assert "raise max_context (--max-context; this model allows 600)" in command("generate", "--max-context", "20", "x" * 30).err


@pytest.mark.parametrize("arguments", [("--debug", "generate"), ("generate", "--debug")])
def test_debug_shows_the_traceback_too(command, arguments):
    result = command(*arguments, "--model", "absent", "x")
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("edgespec: error: no model 'absent'")


def test_unforeseen_errors_are_one_line_too(command, monkeypatch):
    def broken(model, **options):
        raise RuntimeError("boom\nin two lines")

    monkeypatch.setattr("edgespec.load", broken)
    result = command("generate", "x")
    assert result.code == 1
    assert result.err == "edgespec: error: unexpected RuntimeError: boom in two lines (run again with --debug for the traceback)\n"


def test_a_terminal_gets_no_control_characters(monkeypatch, capsys):
    from edgespec_apps.console import write

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write("a\x1b[2Jb\tc\nd\x07")
    assert capsys.readouterr().out == "a\ufffd[2Jb\tc\nd\ufffd"
