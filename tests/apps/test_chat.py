from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.core.chunk import Chunk, Stats
from edgespec_apps.turns import Painter, status
from tests.helpers import fake_runtime


def test_each_line_is_a_turn_and_answers_alone_reach_stdout(command):
    result = command("chat", "--model", "m", stdin=b"one\n\n   \r\ntwo\n")
    assert result.code == 0
    assert result.out == "You said: one. You said: one.\nYou said: two. You said: two.\n"
    assert result.err.startswith("m on toy, draft ngram.")


def test_no_input_is_fine(command):
    assert (command("chat").code, command("chat").out) == (0, "")


def test_the_default_model_is_the_small_one(command):
    command("chat", stdin=b"")
    assert fake_runtime.loads[0]["model"] == "smollm2-135m"


def test_a_model_that_is_not_there_ends_the_chat(command):
    result = command("chat", "--model", "absent", stdin=b"hi\n")
    assert (result.code, result.out) == (1, "")
    assert "run `edgespec pull absent`" in result.err


def test_the_conversation_is_kept_and_reset(command, tmp_path: Path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    command("chat", stdin=f"a\nb\n/save {first}\n/reset\nc\n/save {second}\n".encode())
    said = lambda text: f"You said: {text}. You said: {text}."  # noqa: E731
    assert json.loads(first.read_text()) == {
        "schema": "edgespec.chat/1",
        "model": "smollm2-135m",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": said("a")},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": said("b")},
        ],
    }
    assert [m["content"] for m in json.loads(second.read_text())["messages"]] == ["c", said("c")]


def test_the_system_message_is_sent_and_can_change(command):
    result = command("chat", "--system", "First", stdin=b"a\n/system Second\nb\n/system\n")
    assert result.out == "First: a.\nSecond: b.\n"
    assert result.err.splitlines()[-1] == "system message: Second"


def test_draft_reloads_and_a_bad_one_leaves_the_old(command):
    result = command("chat", "--draft", "none", stdin=b"/draft ngram\na\n/draft absent\nb\n/draft\n")
    assert [load["draft"] for load in fake_runtime.loads] == ["none", "ngram", "absent", "ngram"]
    assert result.out.count("You said: ") == 4
    assert "edgespec: error: no model 'absent'" in result.err
    assert result.err.splitlines()[-1] == "draft: ngram"
    assert result.code == 1


def test_save_overwrites_nothing_but_its_own(command, tmp_path: Path):
    mine, precious = tmp_path / "mine.json", tmp_path / "precious.txt"
    precious.write_text("keep")
    result = command("chat", stdin=f"a\n/save {mine}\n/save {mine}\n/save {precious}\n/save\n".encode())
    assert precious.read_text() == "keep"
    assert result.err.count("saved 2 messages") == 2
    assert f"edgespec: error: {precious}: File exists" in result.err
    assert "/save needs a file name" in result.err


def test_stats_help_quit_and_unknown_commands(command):
    result = command("chat", stdin=b"/stats\na\n/stats\n/help\n/nonsense\n/quit\nnever asked\n")
    assert "no answers yet" in result.err
    assert "1 answer, 26 tokens" in result.err
    assert "/save FILE" in result.err
    assert "edgespec: error: unknown command /nonsense; /help lists them" in result.err
    assert "never" not in result.out
    assert result.code == 1, "one line failed"


def test_commands_in_capitals_and_both_ways_to_switch_colours(command, tmp_path: Path):
    result = command("chat", stdin=f"/drafted ON\n/drafted\n/drafted off\n/Reset\n/SAVE {tmp_path / 'X.json'}\n/EXIT\nnever\n".encode())
    told = [line for line in result.err.splitlines() if line.startswith("guessed")]
    assert told == ["guessed text is coloured", "guessed text is not coloured", "guessed text is not coloured"]
    assert "conversation forgotten" in result.err and (tmp_path / "X.json").exists()
    assert (result.code, result.out) == (0, "")
    assert "takes on, off or nothing, got 'maybe'" in command("chat", stdin=b"/drafted maybe\n").error()


def test_an_answer_that_was_cut_says_where(command):
    [line] = [line for line in command("chat", "--max-tokens", "1", stdin=b"hello\n").err.splitlines() if line.startswith("[")]
    assert line.startswith("[1 token, ") and line.endswith(", stopped at the limit of 1 token]")
    [line] = [line for line in command("chat", "--max-context", "20", stdin=b"hello\n").err.splitlines() if line.startswith("[")]
    assert line.endswith(", the context is full]")


def test_a_path_is_a_prompt_not_a_command(command):
    assert command("chat", stdin=b"/etc/hosts\n").out == "You said: /etc/hosts. You said: /etc/hosts.\n"


def test_a_turn_that_fails_is_one_line_and_forgotten(command, tmp_path: Path):
    file = tmp_path / "chat.json"
    result = command("chat", stdin=b"x" * 700 + b"\nraise\ncaf\xe9\nok\n/save " + str(file).encode() + b"\n")
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if line.startswith("edgespec: error: ")]
    assert len(errors) == 3
    assert "context holds 600" in errors[0] and "/reset" in errors[0]
    assert "the template refuses this" in errors[1]
    assert "line 3 of standard input is not UTF-8" in errors[2]
    assert result.out == "You said: ok. You said: ok.\n"
    assert len(json.loads(file.read_text())["messages"]) == 2


def test_a_full_context_suggests_a_reset_and_a_reset_helps(command):
    result = command("chat", "--max-context", "120", stdin=b"abcdefghijkl\n" * 4 + b"/reset\nabc\n")
    assert "/reset starts the conversation afresh" in result.err
    assert result.out.splitlines()[-1] == "You said: abc. You said: abc."


def test_a_status_line_follows_each_answer(command):
    result = command("chat", stdin=b"hello\n")
    [line] = [line for line in result.err.splitlines() if line.startswith("[")]
    assert line.startswith("[34 tokens, ") and " tok/s, first after " in line and line.endswith(" guesses kept per round]")


def test_status_adds_up_answers():
    def stats(tokens: int, tok_s: float) -> Stats:
        return Stats(rounds=4, drafted=8, kept=6, tokens=tokens, ttft_s=0.5, tok_s=tok_s, overhead_share=0.0, host_bytes_copied=0)

    line = status([stats(10, 10.0), stats(30, 30.0)])
    assert line == "40 tokens, 20.0 tok/s, first after 0.50 s, 1.50 of 2.00 guesses kept per round"


@pytest.mark.parametrize(
    ("texts", "painted"),
    [
        (["ab", "cd"], "\x1b[32ma\x1b[0mb\x1b[32mc\x1b[0md"),
        (["a", "bcd"], "\x1b[32ma\x1b[0mb\x1b[32mc\x1b[0md"),  # text held back for a stop string comes later
        (["", "abc"], "\x1b[32ma\x1b[0mb\x1b[32mc\x1b[0m"),
    ],
)
def test_guessed_tokens_are_coloured_where_their_text_appears(texts, painted):
    painter = Painter({1: "a", 2: "b", 3: "c", 4: "d", 5: ""}.__getitem__)
    chunks = [
        Chunk(text=texts[0], token_ids=(1, 2), origins=("drafted", "corrected")),
        Chunk(text=texts[1], token_ids=(5, 3, 4), origins=("drafted", "drafted", "bonus")),
    ]
    assert "".join(painter.paint(chunk) for chunk in chunks) == painted


def test_text_that_no_token_explains_is_shown_plainly():
    painter = Painter({1: "a"}.__getitem__)
    assert painter.paint(Chunk(text="ab\x1b", token_ids=(1,), origins=("bonus",))) == "ab\ufffd"
